"""Parameters that are gathered as differences are those of stock, which gathers them whole."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.fold3d.observe.trace_files import RankTrace
from tests.distributed import run_distributed
from tests.end_to_end.test_checkpoints import check_resumed
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

BF16 = f"{OVERLAP} --bf16"
IN_BF16 = f"{BF16} --grad-reduce-in-bf16"
STOCK = "--schedule stock"
GATHERED = "parameters were gathered in "  # so many of 16 bits

CODED = "--delta-param-gather on"
_ROWS = (
    Row("stock", BF16, dp=2),
    Row("stock", f"{IN_BF16} {BUCKETS}", dp=2, segments=2),
    Row("aiao", BF16, dp=2, segments=2),
    Row("aiao:wgrad=behind@0:optimizer=replicated@1", f"{BF16} {UNTIED}", dp=2, segments=2),
    Row("aiao:slices=on", IN_BF16, dp=2, segments=2, repeats=True),
    Row("aiao --preemptive-comm", BF16, dp=2, segments=2, repeats=True),
    Row("1f1b", BF16, pp=1, dp=3),
    Row("1f1b", f"{BF16} --sequence-parallel", pp=1, tp=2, dp=2, repeats=True),
    Row("stock", BF16, pp=1, cp=2, dp=2, repeats=True),
    Row("stock", f"{ZERO} --bf16", dp=2),
    Row("1f1b", f"{BF16} {EXPERTS} --moe-token-dispatcher-type alltoall {EP}", pp=1, dp=4),
    Row("aiao", f"{OVERLAP} {FP16}", dp=2),
    Row("stock", f"{BF16} --num-distributed-optimizer-instances 2", pp=1, dp=4),
)
ROWS = tuple(replace(row, word=f"{row.word} {CODED}") for row in _ROWS)
SAVED = Row(dp=2, segments=2, flags=BF16)
RESUMED = ((STOCK, f"--schedule aiao {CODED}"), (f"--schedule aiao {CODED}", f"{STOCK} {CODED}"))


def coded(argv: Sequence[str]) -> tuple[Record, list[str]]:
    """Train with coded gathers; return what is recorded and what the run says of them."""
    said = heard("megatron.fold3d.runtime.grad_sync.delta_gather")
    return train(argv), said


def run_coded(row: Row) -> tuple[list[Record], list[str]]:
    """Return the ranks' records, and what the first says."""
    found = run_distributed(coded, row.num_ranks, row.command(row.ours))
    return [record for record, _ in found], found[0][1]


@pytest.mark.parametrize("row", marked(ROWS), ids=str)
def test_what_is_trained_is_what_stock_trains(row: Row) -> None:
    ours, said = run_coded(row)

    assert any(line.startswith(GATHERED) for line in said), said
    assert differences(ours, once(train, row.num_ranks, row.command(STOCK))) == []


@pytest.mark.parametrize(("saves", "resumes"), RESUMED)
def test_a_resumed_run_goes_on_as_if_uninterrupted(
    saves: str, resumes: str, tmp_path: Path
) -> None:
    check_resumed(SAVED, saves, resumes, tmp_path)


def test_a_run_that_loads_no_optimizer_is_stocks(tmp_path: Path) -> None:
    row = SAVED
    save = row.command(f"{STOCK} --save {tmp_path} --save-interval 2")
    load = row.command(f"{STOCK} --load {tmp_path} --ckpt-step 2 --no-load-optim --finetune")
    run_distributed(train, row.num_ranks, save)

    ours = run_distributed(coded, row.num_ranks, (*load, *CODED.split()))

    stock = run_distributed(train, row.num_ranks, load)
    assert differences([record for record, _ in ours], stock) == []


def test_a_trace_has_coded_gathers_too(tmp_path: Path) -> None:
    row = Row(dp=2, segments=2, flags=BF16, word=f"aiao {CODED}")
    traced = row.command(f"{row.ours} --trace {tmp_path} --trace-iterations 3-3")

    found = run_distributed(coded, 4, traced)

    assert any(line.startswith(GATHERED) for line in found[0][1])
    trace = RankTrace.from_json((tmp_path / "rank-00000.json").read_text())
    kinds = [event.kind for event in trace.iterations[-1].events]
    assert kinds.count("param_gather") >= row.segments
    stock = once(train, 4, row.command(STOCK))
    assert differences([record for record, _ in found], stock) == []


def drifted(rank: int, own: bool, argv: Sequence[str]) -> tuple[Record, list[str]]:
    """Train as `coded`; before its third step a rank flips a bit of a shard, its own or not."""
    import torch.distributed as dist

    from megatron.fold3d.runtime.grad_sync.delta_gather import DeltaGather

    steps, step = [], DeltaGather.step

    def flips(self: DeltaGather, upstream: Any, optimizer: Any) -> bool:
        steps.append(1)
        if len(steps) == 3 and dist.get_rank() == rank:
            replicas = optimizer.data_parallel_group
            (bucket, *_) = optimizer.buffers[0].buckets
            shards = bucket.param_data.chunk(replicas.size())
            other = replicas.rank() if own else (replicas.rank() + 1) % replicas.size()
            shards[other].view(torch.int16)[5] ^= 1 << 3
        return step(self, upstream, optimizer)

    DeltaGather.step = flips  # type: ignore[method-assign]
    return coded(argv)


@pytest.mark.parametrize(
    ("rank", "own"), [(0, True), pytest.param(1, False, marks=pytest.mark.stress), (2, False)]
)
def test_a_replica_that_has_drifted_is_named_and_healed(rank: int, own: bool) -> None:
    row = Row(pp=1, dp=3, flags=BF16, word=f"stock {CODED}")

    found = run_distributed(drifted, 3, rank, own, row.command(row.ours))

    assert any(f"step ranks [{rank}] held other parameters" in line for line in found[0][1])
    stock = once(train, 3, row.command(STOCK))
    assert differences([record for record, _ in found], stock) == []


def gathered_places(argv: Sequence[str]) -> set[int]:
    """Train with coded gathers; return where replicas' messages begin, in bytes behind 16."""
    from megatron.fold3d.runtime.grad_sync.delta_gather import _Gather

    places, begin = set(), _Gather.__init__

    def notes(self: _Gather, group: Any, messages: Any) -> None:
        begin(self, group, messages)
        for whole, _ in self._received:
            places.update(part.data_ptr() % 16 for part in whole.chunk(self._replicas.size()))

    _Gather.__init__ = notes  # type: ignore[method-assign]
    train(argv)
    return places


def test_messages_of_all_replicas_begin_where_nccl_copies_16_bytes_at_once() -> None:
    row = Row(pp=1, dp=3, flags=BF16, word=f"stock {CODED}")

    assert run_distributed(gathered_places, 3, row.command(row.ours)) == [{0}] * 3


def test_auto_says_what_it_measured() -> None:
    auto = Row(dp=2, flags=BF16).command("--schedule aiao --delta-param-gather auto")

    (_, said), *_ = run_distributed(coded, 4, auto)

    assert said[0].startswith("--delta-param-gather auto: ")
