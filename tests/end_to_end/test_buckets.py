"""Every segment's gradients travel in buckets, while its last backward runs, on every rank."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.distributed import run_distributed
from tests.end_to_end.test_equal_to_stock import BUCKETS, Row
from tests.end_to_end.training import train, watch

pytestmark = pytest.mark.gloo


def test_hooks_start_every_bucket_on_every_rank_and_segment() -> None:
    row = Row(dp=2, flags=f"--overlap-grad-reduce {BUCKETS} --num-layers 8")
    for started in run_distributed(buckets_that_hooks_started, 4, row.command(row.ours)):
        counted, *hooked = started
        # Two layers of 12 thousand parameters, and at either end some thousand of embeddings.
        assert [of for _, of in counted] == [of for _, of in hooked[0]]
        assert all(of >= 7 for _, of in counted)
        assert all(by_hooks == 0 for by_hooks, _ in counted)  # DDP only counts, to know when
        assert all(by_hooks == of for iteration in hooked for by_hooks, of in iteration)


def buckets_that_hooks_started(argv: Sequence[str]) -> list[list[tuple[int, int]]]:
    """Train; of each iteration and segment, the buckets under way at ALL_REDUCE, and all."""
    from megatron.fold3d.runtime.grad_sync.dp_sync import DPSync

    seen: list[tuple[int, int]] = []

    def note(dp_sync: DPSync, segment: int) -> None:
        groups: Any = dp_sync._chunks[segment].bucket_groups
        seen.append((sum(g.grad_reduce_handle is not None for g in groups), len(groups)))

    watch(DPSync, "complete", note)
    train(argv)
    return [seen[start : start + 2] for start in range(0, len(seen), 2)]
