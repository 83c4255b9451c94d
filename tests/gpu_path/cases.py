"""The runs that are compared with stock's on the late device, and one comparison."""

import functools
import shlex
from dataclasses import KW_ONLY, dataclass

from tests.distributed import RankError, run_distributed
from tests.end_to_end.test_equal_to_stock import ALLTOALL as EXPERTS
from tests.end_to_end.test_equal_to_stock import FULL as _FULL
from tests.end_to_end.test_equal_to_stock import OVERLAP as ZERO
from tests.end_to_end.test_equal_to_stock import UNTIED
from tests.end_to_end.training import TINY, Record, as_known, differences, once, train
from tests.gpu_path.late_device import Delays
from tests.gpu_path.late_training import Late, train_late
from tests.gpu_path.mutations import Mutation, build
from tests.gpu_path.small_programs import fill_a_queue, trace_early

MODEL = f"{TINY} --num-layers 4 --lr 1e-2 --lr-decay-iters 100 --eval-iters 1"
UNCHECKED = "--no-check-for-nan-in-loss-and-grad"
FULL = f"{_FULL} uniform"
TO_HOST = "--offload-activations on --lazy-inter-segment"
SHARDS = "--shard-segments gradients"
EARLY = "aiao:wgrad=behind"
LATER = "--overlap-grad-reduce --clip-grad 0"
PAIRS = "aiao:pairs=on"
DEFERRED = "step=next:share=0.5"
SHARE = f"1f1b:{DEFERRED}"
TRACED = "--trace TRACE --trace-iterations 1-3"


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison; ``flags`` are of both runs, ``word`` is the schedule of ours and its flags.

    ``checks`` is for Megatron's check for NaN: the host waits for every loss, so less runs behind.
    """

    name: str
    word: str = "aiao"
    flags: str = ""
    _: KW_ONLY
    pp: int = 2
    segments: int = 2
    tp: int = 1
    dp: int = 1
    iterations: int = 3
    checks: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def ours(self) -> str:
        return f"--schedule {self.word}"

    @property
    def allows_one_queue(self) -> bool:
        """False if the flags are refused with one hardware queue."""
        return "wgrad=behind" not in self.ours

    @property
    def num_ranks(self) -> int:
        return self.pp * self.tp * self.dp

    def command(self, scheduled: str) -> tuple[str, ...]:
        sizes = (
            f"--pipeline-model-parallel-size {self.pp} --segments {self.segments} "
            f"--tensor-model-parallel-size {self.tp} "
            f"--global-batch-size {4 * self.dp} --train-iters {self.iterations} "
            f"--eval-interval {self.iterations - 1}"
        )
        unchecked = "" if self.checks else UNCHECKED
        return tuple(shlex.split(f"{MODEL} {unchecked} {sizes} {self.flags} {scheduled}"))


ONE = {"pp": 1, "segments": 1}
CASES = (
    # Where embeddings are tied, all ranks wait for each other before the last send is over.
    Case("transfers", flags=UNTIED),
    Case("host memory", f"aiao {TO_HOST} {TRACED}", FULL),
    Case("weight gradients apart", "aiao:wgrad=last@0,1"),
    Case("gradients in the next iteration", SHARE, f"{LATER} {UNTIED}", **ONE, dp=2),
    Case("distributed optimizer", "1f1b", ZERO, **ONE, dp=2),
    Case("all of it", f"aiao:step=next:share=0.5 {TO_HOST}", LATER, dp=2),
    Case("preemption", "aiao --preemptive-comm", "--overlap-grad-reduce", dp=2),
    Case("shards of parameters and gradients", f"aiao {SHARDS}", f"{ZERO} {UNTIED}", dp=2),
    Case("DP.sync between weight gradients", EARLY, LATER, dp=2),
    Case("DP.sync between weight gradients, and deferred", f"{EARLY}:{DEFERRED}", LATER, dp=2),
    # Measures, tries and chooses until the tenth.
    Case("auto", "auto", f"{ZERO} {UNTIED}", dp=2, iterations=11),
    Case("reductions to shards between weight gradients", EARLY, f"{ZERO} {UNTIED}", dp=2),
    Case("the check for NaN, for which the host waits", flags=UNTIED, dp=2, checks=True),
    Case("pairs of micro-batches", PAIRS, **ONE, tp=2),
    Case(
        "pairs of micro-batches, recomputed, traced, in a pipeline",
        f"{PAIRS} {TRACED}",
        f"--sequence-parallel --bf16 --overlap-grad-reduce {FULL}",
        tp=2,
    ),
    Case("tensor parallelism", flags="--sequence-parallel", tp=2),
    Case("replicated optimizer", "aiao:optimizer=replicated@1", f"{ZERO} {UNTIED}", dp=2),
    Case("experts", flags=f"{EXPERTS} {ZERO}", dp=2),
    Case(
        "preemption with a lane of experts",
        "aiao --preemptive-comm",
        f"{EXPERTS} --expert-tensor-parallel-size 1 --sequence-parallel "
        "--use-distributed-optimizer --overlap-grad-reduce",
        tp=2,  # so that either lane adds up two replicas, in any order
        dp=2,
    ),
    Case("recomputation ahead of the gradient", "aiao:recompute=early", FULL),
    Case(
        "preemption beside tensor parallelism",
        f"aiao:{DEFERRED} --preemptive-comm",
        f"{LATER} --sequence-parallel",
        tp=2,
        dp=2,
    ),
    Case(
        "slices and early parts beside tensor parallelism",
        f"{EARLY}:{DEFERRED}:slices=on",
        f"{LATER} --sequence-parallel",
        tp=2,
        dp=2,
    ),
    Case(
        "codes",
        "aiao --delta-param-gather on --coded-grad-reduce on",
        f"{ZERO} --bf16 {UNTIED}",
        dp=2,
    ),
)
_PROGRAMS = {"trace_early": trace_early, "fill_a_queue": fill_a_queue}


def wrong(
    case: Case, late: Late, folder: object, mutation: Mutation | None = None, timeout_s: float = 120
) -> list[str]:
    """Return what differs from stock in a run on the late device, or the error that ended it."""
    ours = case.command(case.ours.replace("TRACE", str(folder)))
    try:
        records = run_distributed(
            train_late, case.num_ranks, ours, late, mutation, timeout_s=timeout_s, grace_s=0.5
        )
    except RankError as error:
        return [str(error)]
    return differences(records, as_known(records, stock_of(case)))


def found_by(mutation: Mutation, folder: object) -> list[str]:
    """Return how a fault shows: what differs from stock, or the error; nothing if it does not."""
    build(mutation)
    if program := _PROGRAMS.get(mutation.reached_in):
        return program(mutation)
    return wrong(*_reaching(mutation), folder, mutation, timeout_s=60)


@functools.cache
def _sound(case: Case, late: Late, folder: object) -> list[str]:
    return wrong(case, late, folder)


def found_without(mutation: Mutation, folder: object) -> list[str]:
    """Return what is wrong with the same run without the fault: nothing."""
    if program := _PROGRAMS.get(mutation.reached_in):
        return program(None)
    return _sound(*_reaching(mutation), folder)


def _reaching(mutation: Mutation) -> tuple[Case, Late]:
    delays = Delays(longest_s=0.02, always=mutation.late)
    (case,) = (case for case in CASES if case.name == mutation.reached_in)
    return case, Late(delays=delays, num_queues=mutation.num_queues)


def stock_of(case: Case) -> list[Record]:
    """Return what stock's run records; cases with the same command share it."""
    return once(train, case.num_ranks, case.command("--schedule stock"))
