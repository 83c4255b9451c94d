"""``--hierarchical-dp-sync`` adds inside nodes first, bit for bit; else it trains as stock does.

Four replicas on two nodes. Stock adds them in a ring, whose order depends on where in its bucket a
gradient stands, so the results are stock's up to rounding.
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed import run_distributed
from tests.end_to_end.test_equal_to_stock import BUCKETS, UNTIED, Row
from tests.end_to_end.test_more_replicas import Array, train_and_keep_parameters

pytestmark = pytest.mark.gloo

AIAO = "--schedule aiao --hierarchical-dp-sync auto"
# SGD hands differences of rounding on as they are; Adam would divide them by gradients near zero.
JOB = {
    "pp": 1,
    "dp": 4,
    "m": 2,
    "flags": f"--overlap-grad-reduce --optimizer sgd --clip-grad 0 {UNTIED}",
}
Sum = tuple[Array, Array]


@pytest.fixture(scope="module")
def stock() -> list[Array]:
    row = Row(**JOB)
    return run_distributed(train_and_keep_parameters, 4, row.command("--schedule stock"))[0]


@pytest.mark.parametrize(
    "ours",
    [
        f"{AIAO} {BUCKETS}",
        f"{AIAO} --dp-slices on",
        f"{AIAO} --backward-share 0.5 --dp-slice-bytes 8001",
    ],
)
def test_two_nodes_of_two_replicas_add_inside_nodes_first(ours: str, stock: list[Array]) -> None:
    by_rank = run_distributed(train_and_keep_sums, 4, Row(**JOB).command(ours))
    for parameters, _ in by_rank:
        for mine, theirs in zip(parameters, stock, strict=True):
            # Three roundings of fp32 in each of four iterations, on gradients that are no larger
            # than the parameters.
            np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6)
    all_sums = [sums for _, sums in by_rank]
    num_gradients = sum(array.size for array in stock)
    assert sum(after.size for _, after in all_sums[0]) == 4 * num_gradients  # iterations
    for of_ranks in zip(*all_sums, strict=True):
        a, b, c, d = (before for before, _ in of_ranks)
        for _, after in of_ranks:
            np.testing.assert_array_equal(after, (a + b) + (c + d))


def train_and_keep_sums(argv: Sequence[str]) -> tuple[list[Array], list[Sum]]:
    """Train; with the parameters, and what each sum was of and has become on this rank."""
    from megatron.fold3d.runtime.grad_sync import hierarchical_group

    rank = int(os.environ["RANK"])
    os.environ["LOCAL_RANK"] = str(rank % 2)  # two hosts
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    sums: list[Sum] = []
    steps = hierarchical_group._steps

    def kept(levels: Any, tensors: Sequence[torch.Tensor], op: Any) -> Any:
        before = [tensor.numpy().copy() for tensor in tensors]
        three = steps(levels, tensors, op)
        yield next(three)
        yield next(three)
        works = next(three)
        for work in works:
            work.wait()
        sums.extend(zip(before, (tensor.numpy().copy() for tensor in tensors), strict=True))
        yield works

    hierarchical_group._steps = kept
    return train_and_keep_parameters(argv), sums
