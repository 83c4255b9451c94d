"""Parameters that are gathered as differences are those of stock, which gathers them whole."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.fold3d.observe.trace_files import RankTrace
from tests.distributed import run_distributed
from tests.end_to_end.test_checkpoints import resuming, saving
from tests.end_to_end.test_equal_to_stock import (
    ALLTOALL,
    BUCKETS,
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
STOCK = "--schedule stock"
GATHERED = "parameters were gathered in "  # so many of 16 bits

CODED = "--delta-param-gather on"
_ROWS = (
    Row("stock", BF16, dp=2, segments=1),
    Row("stock", f"{IN_BF16} {BUCKETS}", dp=2),
    Row("aiao", BF16, dp=2),
    Row("aiao:wgrad=behind@0:optimizer=replicated@1", f"{BF16} {UNTIED}", dp=2),
    Row("aiao:slices=on", IN_BF16, dp=2, repeats=True),
    Row("aiao --preemptive-comm", BF16, dp=2, repeats=True),
    Row("1f1b", BF16, pp=1, dp=3, segments=1),
    Row("1f1b", f"{BF16} --sequence-parallel", pp=1, tp=2, dp=2, repeats=True, segments=1),
    Row("stock", BF16, pp=1, cp=2, dp=2, repeats=True, segments=1),
    Row("stock", f"{ZERO} --bf16", dp=2, segments=1),
    Row("1f1b", f"{BF16} {ALLTOALL}", pp=1, dp=4, segments=1),
    Row("aiao", f"{OVERLAP} {FP16}", dp=2, segments=1),
    Row("stock", f"{BF16} --num-distributed-optimizer-instances 2", pp=1, dp=4, segments=1),
)
ROWS = tuple(replace(row, word=f"{row.word} {CODED}") for row in _ROWS)
SAVED = Row(dp=2, flags=BF16)


def coded(argv: Sequence[str]) -> tuple[Record, list[str]]:
    """Train with coded gathers; return what is recorded and what the run says of them."""
    said = heard("megatron.fold3d.runtime.grad_sync.delta_gather")
    return train(argv), said


@pytest.mark.parametrize("row", marked(ROWS), ids=str)
def test_what_is_trained_is_what_stock_trains(row: Row) -> None:
    said, *_ = compared(row, coded)
    assert any(line.startswith(GATHERED) for line in said), said


def test_a_run_that_loads_no_optimizer_is_stocks(tmp_path: Path) -> None:
    run_distributed(train, 4, saving(SAVED, STOCK, tmp_path))
    load = (*resuming(SAVED, STOCK, tmp_path), "--no-load-optim", "--finetune")
    ours = run_distributed(train, 4, (*load, *CODED.split()))
    assert differences(ours, run_distributed(train, 4, load)) == []


def test_a_trace_has_coded_gathers_too(tmp_path: Path) -> None:
    traced = f"aiao {CODED} --trace {tmp_path} --trace-iterations 3-3"
    said, *_ = compared(replace(SAVED, word=traced), coded)

    assert any(line.startswith(GATHERED) for line in said)
    trace = RankTrace.from_json((tmp_path / "rank-00000.json").read_text())
    kinds = [event.kind for event in trace.iterations[-1].events]
    assert kinds.count("param_gather") >= SAVED.segments


def drifted(argv: Sequence[str], rank: int, own: bool) -> tuple[Record, list[str]]:
    """Train as `coded`; before its third step a rank flips a bit of a shard, its own or not."""
    import torch.distributed as dist

    from megatron.fold3d.runtime.grad_sync.delta_gather import DeltaGather

    steps = []

    def flip(_: DeltaGather, __: Any, optimizer: Any) -> None:
        steps.append(1)
        if len(steps) == 3 and dist.get_rank() == rank:
            replicas = optimizer.data_parallel_group
            (bucket, *_) = optimizer.buffers[0].buckets
            shards = bucket.param_data.chunk(replicas.size())
            other = replicas.rank() if own else (replicas.rank() + 1) % replicas.size()
            shards[other].view(torch.int16)[5] ^= 1 << 3

    watch(DeltaGather, "step", flip)
    return coded(argv)


THREE = Row(pp=1, dp=3, flags=BF16, word=f"stock {CODED}", segments=1)


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


def test_auto_says_what_it_measured() -> None:
    auto = Row(dp=2, flags=BF16, segments=1).command("--schedule aiao --delta-param-gather auto")
    (_, said), *_ = run_distributed(coded, 4, auto)
    assert said[0].startswith("--delta-param-gather auto: ")
