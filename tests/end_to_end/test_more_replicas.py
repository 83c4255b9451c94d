"""With more than two replicas the sums of DP.sync are stock's up to rounding."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed import run_distributed
from tests.end_to_end.test_equal_to_stock import BUCKETS, Row
from tests.end_to_end.training import train

pytestmark = pytest.mark.gloo

Array = np.ndarray[Any, Any]


@pytest.mark.stress  # test_backward_share and others have four replicas in one pipeline rank
def test_four_replicas_train_as_stock_but_for_rounding() -> None:
    # A ring adds four terms in an order that depends on where in its bucket a gradient stands, and
    # our buckets end elsewhere. SGD hands the difference on as it is; Adam would divide it by
    # gradients near zero. Three roundings of fp32 in each of four iterations, on gradients that
    # are no larger than the parameters.
    row = Row(
        segments=2,
        dp=4,
        m=2,
        flags=f"--overlap-grad-reduce {BUCKETS} --optimizer sgd --clip-grad 0",
        ours="--schedule aiao",
    )
    ours, stock = (
        run_distributed(train_and_keep_parameters, row.num_ranks, row.command(schedule))
        for schedule in (row.ours, "--schedule stock")
    )
    assert sum(a.size for chunks in ours for a in chunks) > 100_000
    for mine, theirs in zip(ours, stock, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def train_and_keep_parameters(argv: Sequence[str]) -> list[Array]:
    """Train; with the parameters of this rank's model chunks."""
    from megatron.training import training

    trained: list[torch.nn.Module] = []
    train_step = training.train_step

    def kept(*args: object, **kwargs: object) -> object:
        trained[:] = args[2]  # type: ignore[call-overload]
        return train_step(*args, **kwargs)

    training.train_step = kept
    train(argv)
    return [p.detach().numpy().copy() for chunk in trained for p in chunk.parameters()]
