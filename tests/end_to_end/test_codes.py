"""What is gathered as differences, and summed in a code, is what stock gathers and sums whole."""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer as buffers

from megatron.fold3d.observe.trace_files import RankTrace
from megatron.fold3d.runtime.grad_sync.coded_sums import CodedSums
from tests.distributed import run_distributed
from tests.end_to_end.test_checkpoints import resuming, saving
from tests.end_to_end.test_equal_to_stock import (
    ALLTOALL,
    BUCKETS,
    EP,
    EXPERTS,
    FP16,
    OVERLAP,
    UNTIED,
    ZERO,
    Row,
    compared,
)
from tests.end_to_end.training import Record, differences, heard, marked, train, watch

pytestmark = pytest.mark.gloo

BF16 = f"{OVERLAP} --bf16"
IN_BF16 = f"{BF16} --grad-reduce-in-bf16"
GATHERS, SUMS = "--delta-param-gather on", "--coded-grad-reduce on"
BOTH = f"{GATHERS} {SUMS}"
TOLD = {  # so many of 16 bits, and so many percent of their bytes
    GATHERS: "parameters were gathered in ",
    SUMS: "gradients were summed in ",
}


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


IN_EXPERTS = f"{BF16} {EXPERTS} --moe-token-dispatcher-type alltoall {EP}"
REPLICATED = "aiao:wgrad=behind@0:optimizer=replicated@1"
ROWS = (
    Row(f"stock {GATHERS}", BF16, dp=2, segments=1),
    Row(f"stock {GATHERS}", f"{IN_BF16} {BUCKETS}", dp=2),
    Row(f"aiao {GATHERS}", BF16, dp=2),
    Row(f"aiao:slices=on {GATHERS}", IN_BF16, dp=2, repeats=True),
    Row(f"aiao --preemptive-comm {GATHERS}", BF16, dp=2, repeats=True),
    Row(f"stock {GATHERS}", BF16, pp=1, cp=2, dp=2, repeats=True, segments=1),
    Row(f"1f1b {GATHERS}", f"{BF16} {ALLTOALL}", pp=1, dp=4, segments=1),
    Row(f"aiao {GATHERS}", f"{OVERLAP} {FP16}", dp=2, segments=1),
    Row(
        f"stock {GATHERS}",
        f"{BF16} --num-distributed-optimizer-instances 2",
        pp=1,
        dp=4,
        segments=1,
    ),
    Row(f"stock {SUMS}", IN_BF16, dp=2, segments=1),
    Row(f"stock {SUMS}", f"{BF16} {BUCKETS}", dp=2),
    Row(f"stock {SUMS}", OVERLAP, dp=2, segments=1),
    Row(f"aiao {SUMS}", IN_BF16, dp=2),
    Row(f"aiao:wgrad=last {SUMS}", f"{IN_BF16} {BUCKETS}", dp=2, repeats=True),
    Row(f"zb-h1 {SUMS}", IN_BF16, dp=2, segments=1),
    Row(f"stock {SUMS}", IN_BF16, pp=1, segments=1, cp=2, dp=1, repeats=True),
    Row(f"1f1b {SUMS}", IN_EXPERTS, pp=1, segments=1, dp=4, reference=in_a_ring),
    Row(f"aiao {SUMS}", f"{OVERLAP} {FP16} --accumulate-allreduce-grads-in-fp32", dp=2),
    # Both codes.
    Row(f"aiao {BOTH}", IN_BF16, dp=2),
    Row(f"stock {BOTH}", f"{ZERO} --bf16", dp=2, segments=1),
    Row(f"{REPLICATED} {BOTH}", f"{BF16} {UNTIED}", dp=2),
    Row(f"1f1b {BOTH}", BF16, pp=1, dp=3, segments=1),
    Row(f"1f1b {BOTH}", f"{BF16} --sequence-parallel", pp=1, tp=2, dp=2, repeats=True, segments=1),
)
SAVED = Row(dp=2, flags=BF16)


def coded(argv: Sequence[str]) -> tuple[Record, list[str]]:
    """Train with codes; return what is recorded and what the run says of them."""
    said = heard("megatron.fold3d.runtime.grad_sync")
    return train(argv), said


@pytest.mark.parametrize("row", marked(ROWS), ids=str)
def test_what_is_trained_is_what_stock_trains(row: Row) -> None:
    said, *_ = compared(row, coded)
    for flag, told in TOLD.items():
        assert any(line.startswith(told) for line in said) == (flag in row.word), said


def test_a_run_that_loads_no_optimizer_is_stocks(tmp_path: Path) -> None:
    run_distributed(train, 4, saving(SAVED, "--schedule stock", tmp_path))
    load = (*resuming(SAVED, "--schedule stock", tmp_path), "--no-load-optim", "--finetune")
    ours = run_distributed(train, 4, (*load, *GATHERS.split()))
    assert differences(ours, run_distributed(train, 4, load)) == []


def test_a_trace_has_what_is_coded_too(tmp_path: Path) -> None:
    row = Row(f"aiao {BOTH} --trace {tmp_path} --trace-iterations 3-3", IN_BF16, dp=2)
    compared(row, coded)
    trace = RankTrace.from_json((tmp_path / "rank-00000.json").read_text())
    kinds = [event.kind for event in trace.iterations[-1].events]
    assert kinds.count("param_gather") >= row.segments
    assert kinds.count("grad_sync") >= row.segments


def test_auto_says_what_it_measured() -> None:
    flags = ("--delta-param-gather auto", "--coded-grad-reduce auto")
    auto = Row(dp=2, flags=IN_BF16).command(f"--schedule aiao {' '.join(flags)}")
    (_, said), *_ = run_distributed(coded, 4, auto)
    for flag in flags:
        assert [line for line in said if line.startswith(f"{flag}: ")] != []


def drifted(argv: Sequence[str], rank: int, own: bool) -> tuple[Record, list[str]]:
    """Train as `coded`; before its third step a rank flips bits of a shard, its own or not."""
    from megatron.fold3d.runtime.grad_sync.delta_gather import DeltaGather

    steps = []

    def flip(_: DeltaGather, __: Any, optimizer: Any) -> None:
        steps.append(1)
        if len(steps) == 3 and dist.get_rank() == rank:
            replicas = optimizer.data_parallel_group
            (bucket, *_) = optimizer.buffers[0].buckets
            shards = bucket.param_data.chunk(replicas.size())
            other = replicas.rank() if own else (replicas.rank() + 1) % replicas.size()
            shards[other].view(torch.int16)[:] ^= 1 << 3  # those that change far heal by themselves

    watch(DeltaGather, "step", flip)
    return coded(argv)


THREE = Row(pp=1, dp=3, flags=BF16, word=f"stock {GATHERS}", segments=1)


@pytest.mark.parametrize(
    ("rank", "own"), [(0, True), pytest.param(1, False, marks=pytest.mark.stress), (2, False)]
)
def test_a_replica_that_has_drifted_is_named_and_healed(rank: int, own: bool) -> None:
    said, *_ = compared(THREE, drifted, rank, own)
    assert any(f"step ranks [{rank}] held other parameters" in line for line in said)


def gathered_places(argv: Sequence[str]) -> set[int]:
    """Train with coded gathers; return where replicas' messages begin, in bytes behind 16."""
    from megatron.fold3d.runtime.grad_sync.delta_gather import _Gather

    places = set()

    def note(_: None, gather: _Gather, *__: Any) -> None:
        for whole, _ in gather._received:
            places.update(part.data_ptr() % 16 for part in whole.chunk(gather._replicas.size()))

    watch(_Gather, "__init__", after=note)
    train(argv)
    return places


def test_messages_of_all_replicas_begin_where_nccl_copies_16_bytes_at_once() -> None:
    assert run_distributed(gathered_places, 3, THREE.command(THREE.ours)) == [{0}] * 3


def summed(kinds: Sequence[str]) -> list[str]:
    """Sum gradients of all ranks in a code, one kind after the other; tell which sums are wrong."""
    dist.init_process_group("gloo")
    return [wrong for dtype in (torch.bfloat16, torch.float32) for wrong in _wrong(dtype, kinds)]


def _wrong(dtype: torch.dtype, kinds: Sequence[str]) -> Iterator[str]:
    replicas, here, values = dist.get_world_size(), dist.get_rank(), 3 * 4096 + 10
    sums = CodedSums(measures=False)
    for step, kind in enumerate(kinds):
        seeds, size = range(100 * step, 100 * step + replicas), values * replicas
        everyones = [gradients(each, dtype, kind, size) for each in seeds]
        own = everyones[here].clone()
        output = own.chunk(replicas)[here]
        handle = sums.reduce_scatter(
            dist.reduce_scatter_tensor, output, own, dist.ReduceOp.SUM, dist.group.WORLD, True
        )
        handle.wait()
        shards = [each.chunk(replicas)[here] for each in everyones]
        if not torch.equal(output, in_order(shards, here)):
            yield f"{step}: {kind} {dtype}"


def gradients(seed: int, dtype: torch.dtype, kind: str, size: int) -> torch.Tensor:
    """Return gradients around 1e-4, or finite values with any exponent."""
    generator = torch.Generator().manual_seed(seed)
    usual = 1e-4 * torch.randn(size, generator=generator)
    if kind == "any":
        usual *= 2.0 ** torch.randint(-60, 60, (size,), generator=generator)
    return usual.to(dtype)


# The code of any bits is longer than they are: gloo sums them whole, and two in any order.
@pytest.mark.parametrize(
    ("replicas", "kinds"),
    [
        (2, ("usual", "usual", "usual", "any", "usual", "usual")),
        (3, ("usual", "usual", "usual")),
        (4, ("usual", "usual", "usual")),
    ],
)
def test_replicas_are_added_up_in_the_order_of_a_ring(replicas: int, kinds: Sequence[str]) -> None:
    assert run_distributed(summed, replicas, kinds) == [[]] * replicas
