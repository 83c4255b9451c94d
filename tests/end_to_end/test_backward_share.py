"""Optimizer steps in the next iteration end where stock's end, bit for bit: one table, one test.

All rows train six iterations with a learning rate and a weight decay that change in each, and
evaluate after the third.
"""

import functools
import logging
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_distributed
from tests.end_to_end.training import Record, differences, train

pytestmark = pytest.mark.gloo

MODEL = (
    "--device cpu --num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --attention-dropout 0 --hidden-dropout 0 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 63 --num-workers 0 --micro-batch-size 1 "
    "--train-iters 6 --lr 1e-2 --lr-decay-iters 10 --lr-warmup-iters 2 --eval-interval 3 "
    "--start-weight-decay 0.01 --end-weight-decay 0.1 --weight-decay-incr-style linear "
    "--overlap-grad-reduce"
)
EVALUATE = "--eval-iters 1"
UNTIED = "--untie-embeddings-and-output-weights"
NORM = re.compile(r"grad norm of iteration (\d+): (.+)")
STEPS = re.compile(r"steps: (\d+) reached into the next iteration, (\d+) waited .*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison; ``ours`` says what the share is, and how our run is scheduled.

    ``whole`` is the number of steps for which all gradients are waited for.
    """

    ours: str
    flags: str = UNTIED
    clip: float = 0
    whole: int = 0
    pp: int = 2
    segments: int = 2
    dp: int = 2
    evaluation: str = EVALUATE

    def __str__(self) -> str:
        layout = f"pp={self.pp} segments={self.segments} dp={self.dp}"
        return f"{self.ours} {self.flags} clip={self.clip} {layout}"

    def command(self, scheduled: str) -> tuple[str, ...]:
        layout = (
            f"--pipeline-model-parallel-size {self.pp} --segments {self.segments} "
            f"--global-batch-size {4 * self.dp} --clip-grad {self.clip}"
        )
        return tuple(shlex.split(f"{MODEL} {layout} {self.evaluation} {self.flags} {scheduled}"))


AIAO = "--schedule aiao --backward-share"

SP = "--tensor-model-parallel-size 2 --sequence-parallel"

ROWS = (
    Row(ours=f"{AIAO} 0"),
    Row(ours=f"{AIAO} 0.3 --aiao-last-segment afab"),
    Row(ours=f"{AIAO} 1 --dp-slice-bytes 4096", flags=f"{UNTIED} --ddp-bucket-size 5000"),
    Row(ours=f"{AIAO} 0.5", flags="--position-embedding-type rope"),
    Row(ours=f"{AIAO} 0.3", flags="--bf16 --no-align-grad-reduce", segments=4),
    Row(ours=f"{AIAO} 0.5", flags="", pp=4, dp=1),
    Row(ours=f"{AIAO} 0.5", flags=f"{UNTIED} --optimizer sgd --no-align-grad-reduce"),
    Row(ours=f"{AIAO} 0.5", evaluation="--eval-iters 0"),
    Row(ours=f"{AIAO} 0.5", flags=f"{UNTIED} --tensor-model-parallel-size 2", dp=1),
    Row(ours=f"{AIAO} 0.5", flags=f"{SP} --qk-layernorm", dp=1),
    Row(ours="--schedule interleaved --backward-share 0.3"),
    Row(ours="--schedule 1f1b --backward-share 0.5", segments=1),
    Row(ours="--schedule 1f1b --backward-share 0.5", flags="", pp=1, segments=1),
    # Clipping: some steps are clipped, some could be, some cannot.
    Row(ours=f"{AIAO} 0.5", clip=3.0, whole=2),
    Row(ours=f"{AIAO} 0.5", flags="--bf16", clip=2.2, whole=2),
    Row(ours=f"{AIAO} 0.5", flags=f"{UNTIED} --bf16", clip=2.2, whole=4),
    Row(ours=f"{AIAO} 0.5", flags="", clip=2.2, whole=2),
    Row(ours="--schedule 1f1b --backward-share 0.5", flags=SP, pp=1, segments=1, clip=2.2, whole=3),
)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_losses_norms_and_parameters_are_those_of_stock(row: Row) -> None:
    num_ranks = row.pp * row.dp * (2 if "--tensor" in row.flags else 1)
    ours = run_distributed(train_and_listen, num_ranks, row.command(row.ours))
    stock = _stock(num_ranks, row.command("--schedule stock"))

    assert differences(*_comparable(ours, stock)) == []
    (speaker,) = (run for run in ours if run.steps)
    assert speaker.steps == [(6 - row.whole, row.whole)]
    assert len(speaker.norms) == 6 - row.whole
    for iteration, norm in speaker.norms.items():
        # The same squares, summed segment by segment.
        expected = float.fromhex(stock[0].record.iterations[iteration - 1]["grad norm"])
        assert norm == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("resumes", ["--schedule stock", f"{AIAO} 0.5"])
def test_a_checkpoint_holds_what_stock_would_have_written(resumes: str, tmp_path: Path) -> None:
    row = Row(ours=f"{AIAO} 0.5", flags="--bf16", clip=2.2)
    saved = row.command(f"{row.ours} --save {tmp_path} --save-interval 4")
    resumed = row.command(f"{resumes} --load {tmp_path} --ckpt-step 4")
    stock = _stock(4, row.command("--schedule stock"))

    assert differences(*_comparable(run_distributed(train_and_listen, 4, saved), stock)) == []
    stock = [run.since(4) for run in stock]
    assert differences(*_comparable(run_distributed(train_and_listen, 4, resumed), stock)) == []


def test_an_iteration_that_is_run_again_counts_once() -> None:
    row = Row(ours=f"{AIAO} 0.5", flags="--bf16", clip=2.2)
    ours, runs = zip(
        *run_distributed(train_each_iteration_twice, 4, row.command(row.ours)), strict=True
    )
    assert runs == (12, 12, 12, 12)
    assert differences(*_comparable(ours, _stock(4, row.command("--schedule stock")))) == []


@dataclass(frozen=True, slots=True)
class Heard:
    """What one rank saw and what it logged."""

    record: Record
    norms: dict[int, float]
    steps: list[tuple[int, int]]

    def since(self, iteration: int) -> "Heard":
        """Return the run without its first iterations and its first evaluation."""
        record = replace(
            self.record,
            iterations=self.record.iterations[iteration:],
            evaluations=self.record.evaluations[1:],
        )
        return replace(self, record=record)


def train_each_iteration_twice(argv: Sequence[str]) -> tuple[Heard, int]:
    """Train; with how often an iteration was run."""
    from megatron.core.rerun_state_machine import RerunMode, RerunStateMachine

    from megatron.fold3d.runtime.executor import Executor

    # There is a flag for it, but it spells the mode in another way than the enumeration.
    init, run, runs = RerunStateMachine.__init__, Executor.__call__, [0]

    def report(self: RerunStateMachine, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{**kwargs, "mode": RerunMode.REPORT_DETERMINISM_STATS})

    def counted(self: Executor, *, forward_only: bool = False, **kwargs: Any) -> Any:
        runs[0] += not forward_only
        return run(self, forward_only=forward_only, **kwargs)

    RerunStateMachine.__init__ = report
    Executor.__call__ = counted
    return train_and_listen(argv), runs[0]


def train_and_listen(argv: Sequence[str]) -> Heard:
    """Train; with the norms that are logged later than the iteration's line, and the steps."""
    norms: dict[int, float] = {}
    steps: list[tuple[int, int]] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if found := NORM.fullmatch(record.getMessage()):
                norms[int(found[1])] = float(found[2])
            if found := STEPS.fullmatch(record.getMessage()):
                steps.append((int(found[1]), int(found[2])))

    logger = logging.getLogger("megatron.fold3d.runtime.deferred_sync")
    logger.setLevel(logging.INFO)
    logger.addHandler(Listener())
    return Heard(train(argv), norms, steps)


@functools.cache
def _stock(num_ranks: int, argv: Sequence[str]) -> list[Heard]:
    return run_distributed(train_and_listen, num_ranks, argv)


def _comparable(ours: Sequence[Heard], stock: Sequence[Heard]) -> tuple[list[Record], list[Record]]:
    """Drop from stock's records the norms that ours did not know when the iteration ended."""
    expected = []
    records = [run.record for run in ours]
    for mine, run in zip(records, stock, strict=True):
        known = [
            {name: value for name, value in row.items() if name != "grad norm" or name in own}
            for row, own in zip(run.record.iterations, mine.iterations, strict=True)
        ]
        expected.append(replace(run.record, iterations=known))
    return records, expected
