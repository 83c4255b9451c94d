"""Delayed weight gradients of Transformer Engine's modules train what stock trains, bit for bit.

The modules stand in for Transformer Engine's, which needs a GPU (`tests/runtime/weight_grads`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from tests.distributed import run_distributed
from tests.end_to_end.training import TINY, Record, differences, train

pytestmark = pytest.mark.gloo

MODEL = (
    f"{TINY} --transformer-impl transformer_engine --num-layers 4 "
    "--global-batch-size 8 --lr 1e-2 --train-iters 3 --lr-decay-iters 10 "
    "--eval-iters 1 --eval-interval 2 --pipeline-model-parallel-size 2"
)
AIAO = "--segments 2 --schedule aiao:wgrad"
OVERLAP = "--overlap-grad-reduce"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison; ``fuses``: whether matmuls add to ``main_grad`` themselves."""

    name: str
    ours: str
    flags: str
    ranks: int = 4
    fuses: bool = False

    def __str__(self) -> str:
        return self.name


ROWS = (
    Row(name="some segments", ours=f"{AIAO}=last@1", flags="", ranks=2),
    Row(name="fused, overlapped", ours=f"{AIAO}=behind", flags=OVERLAP, fuses=True),
    Row(
        name="sequence parallel, recomputed",
        ours=f"{AIAO}=last",
        flags="--tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1",
        fuses=True,
    ),
    Row(
        name="zero bubble, sharded optimizer",
        ours="--schedule zb-h1",
        flags=f"{OVERLAP} --use-distributed-optimizer --overlap-param-gather --bf16",
    ),
)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_delayed_weight_gradients_of_the_engine_train_what_stock_trains(row: Row) -> None:
    flags = f"{MODEL} {row.flags} "
    ours = run_distributed(
        train_engine, row.ranks, (flags + row.ours).split(), row.fuses, timeout_s=120
    )
    segments = " --segments 2" if "--segments" in row.ours else ""
    stock = run_distributed(
        train_engine, row.ranks, f"{flags}--schedule stock{segments}".split(), row.fuses
    )
    assert not differences(ours, stock)


def train_engine(argv: Sequence[str], fuses: bool) -> Record:
    """Train with modules that stand in for Transformer Engine's."""
    from tests.runtime.weight_grads import engine

    with engine.installed(fuses=fuses):
        return train(argv)
