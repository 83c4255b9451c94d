"""Offloaded activations come back as they were: one table against stock, bit for bit."""

import functools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from megatron.fold3d.plan.lowering import add_offload
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.plan.verify import peak_activations
from tests.distributed import run_distributed
from tests.end_to_end.training import Record, differences, train

pytestmark = pytest.mark.gloo

MODEL = (
    "--device cpu --num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --attention-dropout 0 --hidden-dropout 0 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 63 --num-workers 0 --micro-batch-size 1 "
    "--lr 1e-2 --eval-iters 1 --eval-interval 3"
)
ITERATIONS = "--train-iters 4 --lr-decay-iters 10"
ON = "--offload-activations on"
LAZY = "--lazy-inter-segment"
PP = 2
FULL = "--recompute-granularity full --recompute-num-layers 1 --recompute-method uniform"
SELECTIVE = "--recompute-granularity selective"
# Micro-batches: 2, 4, 4, 6, 6; thresholds count tokens.
RAMP_UP = (
    "--step-batch-size-schedule '0:2 32:4 112:6' --train-samples 22 --lr-decay-samples 40 "
    "--eval-global-batch-size 4"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison.

    Attributes:
        flags: of both runs.
        recompute: of ours alone: recomputation gives stock's bits, as `test_equal_to_stock` shows.
        moves: what ours keeps in host memory.
    """

    schedule: str = "aiao"
    recompute: str = ""
    moves: str = ON
    flags: str = ""
    tp: int = 1
    segments: int = 2
    m: int = 6

    def __str__(self) -> str:
        recompute = self.recompute.split()[1] if self.recompute else "none"
        sizes = f"segments={self.segments} m={self.m} tp={self.tp}"
        return f"{self.schedule} {self.moves} recompute={recompute} {self.flags} {sizes}"

    def command(self, ours: str = "") -> tuple[str, ...]:
        layout = (
            f"--pipeline-model-parallel-size {PP} --tensor-model-parallel-size {self.tp} "
            f"--segments {self.segments}"
        )
        size = "" if "schedule" in self.flags else f"{ITERATIONS} --global-batch-size {self.m}"
        return tuple(shlex.split(f"{MODEL} {layout} {size} {self.flags} {ours}"))

    @property
    def peaks(self) -> tuple[int, ...]:
        """What the verifier expects on the device, by pipeline rank."""
        order = build(
            self.schedule,
            num_ranks=PP,
            num_segments=self.segments,
            num_microbatches=self.m,
        )
        return peak_activations(add_offload(order))


ROWS = (
    Row(recompute=FULL),
    Row(),
    Row(recompute=SELECTIVE, schedule="afab"),
    Row(recompute=FULL, moves=LAZY),
    Row(recompute=FULL, moves=f"{ON} {LAZY}", flags="--bf16", segments=4, m=4),
    Row(recompute=FULL, flags="--sequence-parallel", tp=2, segments=1),
    Row(recompute=FULL, moves=f"{ON} {LAZY}", flags=RAMP_UP),
)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_losses_norms_and_parameters_are_those_of_stock(row: Row) -> None:
    ours = f"--schedule {row.schedule} {row.recompute} {row.moves}"
    runs = run_distributed(train_and_count, PP * row.tp, row.command(ours))

    stock = _stock(PP * row.tp, row.command("--schedule stock"))
    assert differences([record for record, _ in runs], stock) == []
    for rank, (_, counts) in enumerate(runs):
        if counts is None:
            assert ON not in row.moves
            continue
        assert counts.peak == row.peaks[rank // row.tp]
        assert counts.pool_bytes <= 1.05 * counts.high_water_bytes
        # The pool grows at the begin of an iteration, once it knows the size of each stage.
        assert counts.growths[-2:] == [counts.growths[-1]] * 2
        assert counts.early == counts.reloads


@functools.cache
def _stock(num_ranks: int, argv: Sequence[str]) -> list[Record]:
    records: list[Record] = run_distributed(train, num_ranks, argv)
    return records


@dataclass(frozen=True, slots=True)
class Counts:
    """What the offloader of a rank did; how often the pool had grown by each iteration."""

    peak: int
    pool_bytes: int
    high_water_bytes: int
    growths: list[int]
    reloads: int
    early: int


def train_and_count(argv: Sequence[str]) -> tuple[Record, Counts | None]:
    """Train; with what the offloader did."""
    from megatron.fold3d.runtime.offloader import Offloader

    made: list[Offloader] = []
    growths: list[int] = []
    begin = Offloader.begin

    def counted(self: Offloader, *args: Any) -> None:
        begin(self, *args)
        made.append(self)
        growths.append(self.pool.num_growths)

    Offloader.begin = counted
    record = train(argv)
    if not made:
        return record, None
    offloader = made[0]
    pool = offloader.pool
    return record, Counts(
        offloader.peak,
        pool.num_bytes,
        pool.high_water_bytes,
        [*growths[1:], pool.num_growths],
        offloader.num_reloads,
        offloader.num_early,
    )
