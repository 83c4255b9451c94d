"""Gradients that are summed in a code are those that stock sums whole."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer as buffers

from megatron.fold3d.observe.trace_files import RankTrace
from megatron.fold3d.runtime.grad_sync.coded_sums import CodedSums
from tests.distributed import run_distributed
from tests.end_to_end.test_delta_gather import BF16, IN_BF16, STOCK
from tests.end_to_end.test_equal_to_stock import (
    BUCKETS,
    EP,
    EXPERTS,
    FP16,
    OVERLAP,
    UNTIED,
    ZERO,
    Row,
)
from tests.end_to_end.training import Record, differences, heard, marked, once, train

pytestmark = pytest.mark.gloo

SUMMED = "gradients were summed in "  # so many percent of their bytes
CODED = "--coded-grad-reduce on"
IN_EXPERTS = f"{BF16} {EXPERTS} --moe-token-dispatcher-type alltoall"


def in_a_ring(argv: Sequence[str]) -> Record:
    """Train as stock does; replicas add up in the order of a ring, where gloo takes another."""
    buffers.dist_reduce_scatter_func = sum_in_a_ring
    return train(argv)


def sum_in_a_ring(
    output: torch.Tensor, gradients: torch.Tensor, op: object, group: dist.ProcessGroup, **_: object
) -> None:
    """Sum gradients as ``dist.reduce_scatter_tensor``, at once."""
    assert op == dist.ReduceOp.SUM
    replicas, here = group.size(), group.rank()
    everyones = [torch.empty_like(gradients) for _ in range(replicas)]
    dist.all_gather(everyones, gradients, group)
    output.copy_(in_order([each.chunk(replicas)[here] for each in everyones], here))


def in_order(shards: Sequence[torch.Tensor], here: int) -> torch.Tensor:
    """Add up what replicas have of a shard; its own replica comes last."""
    return functools.reduce(torch.add, (*shards[here + 1 :], *shards[: here + 1]))


_ROWS = (
    Row("stock", IN_BF16, dp=2, segments=1),
    Row("stock", f"{BF16} {BUCKETS}", dp=2, segments=2),
    Row("stock", OVERLAP, dp=2, segments=1),
    Row("stock", f"{ZERO} --bf16", dp=2, segments=1),
    Row("aiao", IN_BF16, dp=2, segments=2),
    Row("aiao --delta-param-gather on", IN_BF16, dp=2, segments=2),
    Row("aiao:wgrad=behind@0:optimizer=replicated@1", f"{BF16} {UNTIED}", dp=2, segments=2),
    Row("aiao:wgrad=last", f"{IN_BF16} {BUCKETS}", dp=2, segments=2, repeats=True),
    Row("zb-h1", IN_BF16, dp=2, segments=1),
    Row("1f1b", f"{BF16} --sequence-parallel", pp=1, segments=1, tp=2, dp=2, repeats=True),
    Row("stock", IN_BF16, pp=1, segments=1, cp=2, dp=1, repeats=True),
    Row("1f1b", f"{IN_EXPERTS} {EP}", pp=1, segments=1, dp=4, reference=in_a_ring),
    Row("aiao", f"{OVERLAP} {FP16} --accumulate-allreduce-grads-in-fp32", dp=2),
    Row("1f1b", BF16, pp=1, dp=3, segments=1),
)
ROWS = tuple(replace(row, word=f"{row.word} {CODED}") for row in _ROWS)


def coded(argv: Sequence[str]) -> tuple[Record, list[str]]:
    """Train with coded sums; return what is recorded and what the run says of them."""
    said = heard("megatron.fold3d.runtime.grad_sync.coded_sums")
    return train(argv), said


@pytest.mark.parametrize("row", marked(ROWS), ids=str)
def test_what_is_trained_is_what_stock_trains(row: Row) -> None:
    found = run_distributed(coded, row.num_ranks, row.command(row.ours))

    assert any(line.startswith(SUMMED) for line in found[0][1]), found[0][1]
    stock = once(row.reference, row.num_ranks, row.command(STOCK))
    assert differences([record for record, _ in found], stock) == []


def summed(seed: int, dtype: torch.dtype, kinds: Sequence[str]) -> list[bool]:
    """Sum gradients of every rank in a code, one kind after the other; tell which sums are right.

    Args:
        kinds: ``usual`` ones, or ``any`` bits, whose code is longer than they are.
    """
    dist.init_process_group("gloo")
    replicas, here, values = dist.get_world_size(), dist.get_rank(), 3 * 4096 + 10
    sums, found = CodedSums(measures=False), []
    for step, kind in enumerate(kinds):
        seeds, size = range(seed + 100 * step, seed + 100 * step + replicas), values * replicas
        everyones = [gradients(each, dtype, kind, size) for each in seeds]
        own = everyones[here].clone()
        output = own.chunk(replicas)[here]
        handle = sums.reduce_scatter(
            dist.reduce_scatter_tensor, output, own, dist.ReduceOp.SUM, dist.group.WORLD, True
        )
        handle.wait()
        shards = [each.chunk(replicas)[here] for each in everyones]
        found.append(torch.equal(output, in_order(shards, here)))
    return found


def gradients(seed: int, dtype: torch.dtype, kind: str, size: int) -> torch.Tensor:
    """Return gradients around 1e-4, or finite values with any exponent."""
    generator = torch.Generator().manual_seed(seed)
    usual = 1e-4 * torch.randn(size, generator=generator)
    if kind == "any":
        usual *= 2.0 ** torch.randint(-60, 60, (size,), generator=generator)
    return usual.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_replicas_are_added_up_in_the_order_of_a_ring(replicas: int, dtype: torch.dtype) -> None:
    for found in run_distributed(summed, replicas, 7, dtype, ["usual"] * 3):
        assert all(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_whose_code_is_too_long_are_summed_whole(dtype: torch.dtype) -> None:
    kinds = ["usual", "any", "usual", "usual"]
    for found in run_distributed(summed, 2, 8, dtype, kinds):
        assert all(found)


def test_a_trace_has_coded_sums_too(tmp_path: Path) -> None:
    row = Row(dp=2, flags=IN_BF16, word=f"aiao {CODED}")
    traced = row.command(f"{row.ours} --trace {tmp_path} --trace-iterations 3-3")

    found = run_distributed(coded, 4, traced)

    trace = RankTrace.from_json((tmp_path / "rank-00000.json").read_text())
    kinds = [event.kind for event in trace.iterations[-1].events]
    assert kinds.count("grad_sync") >= row.segments
    stock = once(train, 4, row.command(STOCK))
    assert differences([record for record, _ in found], stock) == []


def test_auto_says_what_it_measured() -> None:
    auto = Row(dp=2, flags=IN_BF16).command("--schedule aiao --coded-grad-reduce auto")

    (_, said), *_ = run_distributed(coded, 4, auto)

    assert said[0].startswith("--coded-grad-reduce auto: ")
