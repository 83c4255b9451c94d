"""Every schedule trains what stock Megatron trains, bit for bit: one table, one test.

The two runs of a row have the same model, data and model chunks; they differ in who decides the
order. All rows train four iterations, evaluate after the third and the last, and clip gradients.
"""

import functools
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.distributed import run_distributed
from tests.end_to_end.training import Record, differences, train

pytestmark = pytest.mark.gloo

MODEL = (
    "--device cpu --num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --attention-dropout 0 --hidden-dropout 0 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 63 --num-workers 0 --micro-batch-size 1 "
    "--train-iters 4 --lr 1e-2 --lr-decay-iters 10 --eval-iters 1 --eval-interval 3"
)
# Stock's interleaved schedule takes any number of micro-batches only as one group: breadth-first.
ONE_GROUP = "--microbatch-group-size-per-virtual-pipeline-stage {m}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison.

    Attributes:
        name: what the row adds to the others.
        m: micro-batches per iteration.
        flags: of both runs.
        ours: how our run is scheduled.
        stock: how the reference differs from `flags`.
        plan: the plan file that `ours` names ``PLAN``, or the `fold3d` command that prints it.
    """

    name: str
    pp: int = 2
    segments: int = 1
    m: int = 4
    tp: int = 1
    dp: int = 1
    flags: str = ""
    ours: str = "--schedule aiao"
    stock: str = ""
    plan: str = ""

    def __str__(self) -> str:
        sizes = {"pp": self.pp, "segments": self.segments, "m": self.m}
        sizes |= {name: n for name, n in (("tp", self.tp), ("dp", self.dp)) if n > 1}
        return ", ".join([self.name, *(f"{name}={n}" for name, n in sizes.items())])

    @property
    def num_ranks(self) -> int:
        return self.pp * self.tp * self.dp

    def command(self, scheduled: str) -> tuple[str, ...]:
        layout = (
            f"--pipeline-model-parallel-size {self.pp} --segments {self.segments} "
            f"--tensor-model-parallel-size {self.tp} --global-batch-size {self.m * self.dp}"
        )
        if "--pipeline-model-parallel-layout" in self.flags:
            layout = layout.replace(f"--segments {self.segments}", "")
        return tuple(shlex.split(f"{MODEL} {layout} {self.flags} {scheduled.format(m=self.m)}"))


ZERO = "--use-distributed-optimizer"
OVERLAP = f"{ZERO} --overlap-grad-reduce --overlap-param-gather"
FULL = "--recompute-granularity full --recompute-num-layers 1 --recompute-method"
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
AFAB_TAIL = "--schedule aiao --aiao-last-segment afab"

ROWS = (
    # Every schedule, against one run of stock for each layout.
    Row(name="aiao", segments=2),
    Row(name="aiao with the paper's last segment", segments=2, ours=AFAB_TAIL),
    Row(name="afab", segments=2, ours="--schedule afab"),
    Row(name="interleaved", segments=2, ours="--schedule interleaved"),
    Row(name="breadth-first", segments=2, ours="--schedule breadth-first"),
    Row(
        name="a plan of fold3d plan",
        segments=2,
        ours="--plan-file PLAN",
        plan="fold3d plan --schedule aiao --pp 2 --segments 2 --microbatches 4",
    ),
    Row(
        name="a plan written by hand",
        segments=2,
        ours="--plan-file PLAN",
        plan="0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3 2B0 2B1 0B0 0B1 2B2 2B3 0B2 0B3\n"
        "1F0 1F1 1F2 1F3 3F0 3F1 3B0 3B1 3F2 1B0 1B1 3B2 3F3 3B3 1B2 1B3",
    ),
    Row(name="aiao", pp=4, m=6),
    Row(name="afab", pp=4, m=6, ours="--schedule afab"),
    Row(name="1f1b", pp=4, m=6, ours="--schedule 1f1b"),
    Row(name="shifted-critical-path", pp=4, m=6, ours="--schedule shifted-critical-path"),
    # Sizes.
    Row(name="no pipeline", pp=1),
    Row(name="no pipeline", pp=1, dp=2, m=3, flags=OVERLAP, ours="--schedule 1f1b"),
    Row(name="three segments", segments=3, m=2, flags="--num-layers 6"),
    Row(name="four segments, one group", segments=4, m=5, stock=ONE_GROUP),
    Row(name="one group", pp=4, segments=2, m=6, stock=ONE_GROUP),
    Row(
        name="interleaved with uneven groups",
        pp=4,
        segments=2,
        m=6,
        ours="--schedule interleaved",
        stock=ONE_GROUP,
    ),
    Row(name="fewer micro-batches than ranks", pp=4, m=2),
    Row(
        name="fewer micro-batches than ranks",
        pp=4,
        m=2,
        ours="--schedule shifted-critical-path",
    ),
    Row(name="evaluation with one micro-batch", m=3, flags="--eval-global-batch-size 1"),
)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_losses_norms_and_parameters_are_those_of_stock(row: Row, tmp_path: Path) -> None:
    plan_file = tmp_path / "plan"
    plan_file.write_text(_plan(row.plan))
    ours = row.command(row.ours.replace("PLAN", str(plan_file)))
    stock = row.command(f"--schedule stock {row.stock}")

    record = run_distributed(train, row.num_ranks, ours)

    assert differences(record, _reference(row.num_ranks, stock)) == []


@functools.cache
def _reference(num_ranks: int, argv: Sequence[str]) -> list[Record]:
    records: list[Record] = run_distributed(train, num_ranks, argv)
    return records


def _plan(written: str) -> str:
    if not written.startswith("fold3d "):
        return written
    command = [str(Path(sys.executable).with_name("fold3d")), *written.split()[1:]]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
