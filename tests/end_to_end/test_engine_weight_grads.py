"""Delayed weight gradients of Transformer Engine's modules train what stock trains, bit for bit.

The modules stand in for Transformer Engine's, which needs a GPU (`tests/runtime/weight_grads`).
"""

from collections.abc import Sequence

import pytest

from tests.distributed import run_distributed
from tests.end_to_end.test_equal_to_stock import FULL
from tests.end_to_end.test_equal_to_stock import OVERLAP as SHARDED
from tests.end_to_end.training import TINY, Record, differences, train

pytestmark = pytest.mark.gloo

MODEL = (
    f"{TINY} --transformer-impl transformer_engine --num-layers 4 "
    "--global-batch-size 8 --lr 1e-2 --train-iters 3 --lr-decay-iters 10 "
    "--eval-iters 1 --eval-interval 2 --pipeline-model-parallel-size 2"
)
AIAO = "--segments 2 --schedule aiao:wgrad"
OVERLAP = "--overlap-grad-reduce"


ROWS = (
    # The schedule of ours, flags of both, and whether matmuls add to ``main_grad`` themselves.
    (f"{AIAO}=behind", OVERLAP, True),
    (f"{AIAO}=last", f"--tensor-model-parallel-size 2 --sequence-parallel {FULL} uniform", True),
    ("--schedule zb-h1", f"{SHARDED} --bf16", False),
)


@pytest.mark.parametrize(("scheduled", "flags", "fuses"), ROWS)
def test_delayed_weight_gradients_of_the_engine_train_what_stock_trains(
    scheduled: str, flags: str, fuses: bool
) -> None:
    stock = "--segments 2 --schedule stock" if "--segments" in scheduled else "--schedule stock"
    ours, theirs = (
        run_distributed(train_engine, 4, f"{MODEL} {flags} {which}".split(), fuses)
        for which in (scheduled, stock)
    )
    assert not differences(ours, theirs)


def train_engine(argv: Sequence[str], fuses: bool) -> Record:
    """Train with modules that stand in for Transformer Engine's."""
    from tests.runtime.weight_grads import engine

    with engine.installed(fuses=fuses):
        return train(argv)
