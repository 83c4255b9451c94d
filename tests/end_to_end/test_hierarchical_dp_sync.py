"""``--hierarchical-dp-sync`` trains what stock does, bit for bit, if that adds in the same order.

Four replicas on two nodes. The reference is stock Megatron whose reductions are done by hand: every
rank has all ranks' gradients sent to it, adds those of each node, and then the nodes' sums.
"""

import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_distributed
from tests.end_to_end.test_equal_to_stock import BUCKETS, Row
from tests.end_to_end.training import Record, differences, train

pytestmark = pytest.mark.gloo

AIAO = "--schedule aiao --hierarchical-dp-sync auto"
# No step is clipped, but each might be: a bound on the norm decides whether it may be late.
FLAGS = f"--overlap-grad-reduce --clip-grad 100 {BUCKETS}"
SHARDED = f"{FLAGS} --use-distributed-optimizer --overlap-param-gather"
ROWS = (
    Row(pp=1, dp=4, m=2, flags=FLAGS, ours=AIAO),
    Row(pp=1, dp=4, m=2, flags=FLAGS, ours=f"{AIAO} --dp-slices on"),
    Row(pp=1, dp=4, m=2, flags=FLAGS, ours=f"{AIAO} --backward-share 0.5 --dp-slice-bytes 8001"),
    Row(pp=1, dp=4, m=2, flags=SHARDED, ours=AIAO),
    Row(
        pp=1,
        dp=4,
        m=2,
        flags=SHARDED,
        ours=f"{AIAO} --backward-share 0.5 --shard-segments gradients",
    ),
)


@cache
def stock(flags: str) -> list[Record]:
    row = next(row for row in ROWS if row.flags == flags)
    return run_distributed(train_by_hand, 4, row.command("--schedule stock"))


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_two_nodes_of_two_replicas_train_as_stock_that_adds_inside_nodes_first(row: Row) -> None:
    ours = run_distributed(train_on_two_nodes, 4, row.command(row.ours))
    norms_are_late = "--backward-share" in row.ours
    assert [
        line
        for line in differences(ours, stock(row.flags))
        if not (norms_are_late and "grad norm" in line)
    ] == []


def train_on_two_nodes(argv: Sequence[str]) -> Record:
    os.environ |= {"LOCAL_RANK": str(int(os.environ["RANK"]) % 2), "LOCAL_WORLD_SIZE": "2"}
    return train(argv)


def train_by_hand(argv: Sequence[str]) -> Record:
    """Train with gradients that are gathered and then added."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    from megatron.fold3d.runtime.grad_sync.bucket_groups import group_of, set_group

    start = _ParamAndGradBucketGroup.start_grad_sync

    def start_by_hand(self: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(group := group_of(self), ByHand):
            set_group(self, ByHand(group))
        start(self, *args, **kwargs)

    _ParamAndGradBucketGroup.start_grad_sync = start_by_hand
    return train_on_two_nodes(argv)


class ByHand(dist.ProcessGroup):
    """Four ranks whose sums are those of the first two and of the last two, added."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self.group = group
        known = dist.distributed_c10d._world
        known.pg_map[self] = known.pg_map[group]
        known.pg_group_ranks[self] = known.pg_group_ranks[group]

    def allreduce(self, tensors: Sequence[torch.Tensor], options: Any = None) -> "ByHand":
        for tensor in tensors:
            terms = [torch.empty_like(tensor) for _ in range(4)]
            dist.all_gather(terms, tensor, group=self.group)
            a, b, c, d = terms
            tensor.copy_((a + b) + (c + d))
        return self  # done, and so its own work

    allreduce_coalesced = allreduce

    def reduce_scatter_single(
        self, output: torch.Tensor, whole: torch.Tensor, options: Any = None
    ) -> "ByHand":
        self.allreduce([whole])
        output.copy_(whole.chunk(4)[self.rank()])
        return self

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor], options: Any = None
    ) -> "ByHand":
        for output, whole in zip(outputs, wholes, strict=True):
            self.reduce_scatter_single(output, whole)
        return self

    def all_gather_single(
        self, whole: torch.Tensor, shard: torch.Tensor, options: Any = None
    ) -> "ByHand":
        dist.all_gather([*whole.chunk(4)], shard.clone(), group=self.group)
        return self

    def all_gather_single_coalesced(
        self, wholes: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], options: Any = None
    ) -> "ByHand":
        for whole, shard in zip(wholes, shards, strict=True):
            self.all_gather_single(whole, shard)
        return self

    def wait(self) -> bool:
        return True
