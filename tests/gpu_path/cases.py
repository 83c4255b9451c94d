"""The runs that are compared with stock's on the late device, and one comparison."""

import functools
import shlex
from dataclasses import dataclass

from tests.distributed import RankError, run_distributed
from tests.end_to_end.training import TINY, Record, as_known, differences, once, train
from tests.gpu_path.late_device import Delays
from tests.gpu_path.late_training import Late, train_late
from tests.gpu_path.mutations import FULL_QUEUE, LANES, Mutation, build
from tests.gpu_path.small_programs import fill_a_queue, trace_early

MODEL = f"{TINY} --num-layers 4 --lr 1e-2 --lr-decay-iters 100 --eval-iters 1"
UNCHECKED = "--no-check-for-nan-in-loss-and-grad"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
TO_HOST = "--offload-activations on --lazy-inter-segment"
ZERO = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
TRACED = "--trace TRACE"
UNTIED = "--untie-embeddings-and-output-weights"
SHARDS = "--shard-segments gradients"
EARLY = "--schedule aiao:wgrad=behind"
LATER = "--overlap-grad-reduce --clip-grad 0"
EXPERTS = (
    "--num-experts 2 --moe-aux-loss-coeff 0.01 --moe-router-topk 1 --moe-router-pre-softmax "
    "--disable-bias-linear --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2"
)
PAIRS = "--schedule aiao:pairs=on"
SHARE = "--schedule 1f1b:step=next:share=0.5"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One comparison; ``flags`` are of both runs, ``ours`` of ours alone.

    ``checks`` is for Megatron's check for NaN: the host waits for every loss, so less runs behind.
    """

    name: str
    ours: str = "--schedule aiao"
    flags: str = ""
    pp: int = 2
    segments: int = 2
    tp: int = 1
    dp: int = 1
    iterations: int = 3
    checks: bool = False

    def __str__(self) -> str:
        return self.name

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


CASES = (
    # Where embeddings are tied, all ranks wait for each other before the last send is over.
    Case(name="transfers", flags=UNTIED),
    Case(
        name="host memory",
        ours=f"--schedule aiao {TO_HOST} --trace TRACE --trace-iterations 1-3",
        flags=FULL,
    ),
    Case(name="weight gradients apart", ours="--schedule aiao:wgrad=last@0,1"),
    Case(
        name="gradients in the next iteration",
        ours=SHARE,
        flags=f"{LATER} {UNTIED}",
        pp=1,
        segments=1,
        dp=2,
    ),
    Case(name="distributed optimizer", flags=ZERO, pp=1, segments=1, dp=2, ours="--schedule 1f1b"),
    Case(
        name="all of it", ours=f"--schedule aiao:step=next:share=0.5 {TO_HOST}", flags=LATER, dp=2
    ),
    Case(
        name="preemption",
        ours="--schedule aiao --preemptive-comm",
        flags="--overlap-grad-reduce",
        dp=2,
    ),
    Case(
        name="shards of parameters and gradients",
        ours=f"--schedule aiao {SHARDS}",
        flags=f"{ZERO} {UNTIED}",
        dp=2,
    ),
    Case(name="DP.sync between weight gradients", ours=EARLY, flags=LATER, dp=2),
    Case(
        name="DP.sync between weight gradients, and deferred",
        ours=f"{EARLY}:step=next:share=0.5",
        flags=LATER,
        dp=2,
    ),
    Case(  # measures, tries and chooses until the tenth
        name="auto", ours="--schedule auto", flags=f"{ZERO} {UNTIED}", dp=2, iterations=11
    ),
    Case(
        name="reductions to shards between weight gradients",
        ours=EARLY,
        flags=f"{ZERO} {UNTIED}",
        dp=2,
    ),
    Case(
        name="the check for NaN, for which the host waits",
        flags=UNTIED,
        dp=2,
        checks=True,
    ),
    Case(name="pairs of micro-batches", ours=PAIRS, pp=1, tp=2, segments=1),
    Case(
        name="pairs of micro-batches, recomputed, traced, in a pipeline",
        ours=f"{PAIRS} --trace TRACE --trace-iterations 1-3",
        flags=f"--sequence-parallel --bf16 --overlap-grad-reduce {FULL}",
        tp=2,
    ),
    Case(name="tensor parallelism", flags="--sequence-parallel", tp=2),
    Case(
        name="replicated optimizer",
        ours="--schedule aiao:optimizer=replicated@1",
        flags=f"{ZERO} {UNTIED}",
        dp=2,
    ),
    Case(name="experts", flags=f"{EXPERTS} {ZERO}", dp=2),
    Case(
        name="preemption with a lane of experts",
        ours="--schedule aiao --preemptive-comm",
        flags=f"{EXPERTS} --expert-tensor-parallel-size 1 --sequence-parallel "
        "--use-distributed-optimizer --overlap-grad-reduce",
        tp=2,  # so that either lane adds up two replicas, in any order
        dp=2,
    ),
    Case(
        name="recomputation ahead of the gradient",
        ours="--schedule aiao:recompute=early",
        flags=FULL,
    ),
    Case(
        name="preemption beside tensor parallelism",
        ours="--schedule aiao:step=next:share=0.5 --preemptive-comm",
        flags=f"{LATER} --sequence-parallel",
        tp=2,
        dp=2,
    ),
    Case(
        name="slices and early parts beside tensor parallelism",
        ours=f"{EARLY}:step=next:share=0.5:slices=on",
        flags=f"{LATER} --sequence-parallel",
        tp=2,
        dp=2,
    ),
    Case(
        name="coded gathers",
        ours="--schedule aiao --delta-param-gather on",
        flags=f"{ZERO} --bf16 {UNTIED}",
        dp=2,
    ),
)
_BY_FLAGS = {  # what reaches the mutations of these flags
    "": CASES[0],
    TO_HOST: CASES[1],
    SHARE: CASES[3],
    LATER: CASES[5],
    SHARDS: CASES[7],
    EARLY: CASES[8],
    PAIRS: CASES[14],
    LANES: CASES[18],
}
_PROGRAMS = {TRACED: trace_early, FULL_QUEUE: fill_a_queue}


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
    if program := _PROGRAMS.get(mutation.flags):
        return program(mutation)
    return wrong(*_reaching(mutation), folder, mutation, timeout_s=60)


@functools.cache
def _sound(case: Case, late: Late, folder: object) -> list[str]:
    return wrong(case, late, folder)


def found_without(mutation: Mutation, folder: object) -> list[str]:
    """Return what is wrong with the same run without the fault: nothing."""
    if program := _PROGRAMS.get(mutation.flags):
        return program(None)
    return _sound(*_reaching(mutation), folder)


def _reaching(mutation: Mutation) -> tuple[Case, Late]:
    delays = Delays(longest_s=0.02, always=mutation.late)
    return _BY_FLAGS[mutation.flags], Late(delays=delays, num_queues=mutation.num_queues)


def stock_of(case: Case) -> list[Record]:
    """Return what stock's run records; cases with the same command share it."""
    return once(train, case.num_ranks, case.command("--schedule stock"))
