"""How a model chunk's gradients are cut, on buckets of a few numbers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.fold3d.runtime.grad_sync.pieces import (
    Piece,
    in_iteration_offsets,
    of_shards,
    outside,
    ranges_of,
    slices,
    split_after,
)
from megatron.fold3d.runtime.grad_sync.stage_gradients import StageGradients
from tests.distributed import run_distributed
from tests.end_to_end.training import watch
from tests.runtime.grad_sync.buckets import Group, bucket_of, group_of

A, B, C = (torch.nn.Parameter(torch.zeros(1)) for _ in range(3))


RANGES = {A: (0, 2), B: (2, 5), C: (5, 10)}


@pytest.fixture
def bucket() -> Any:
    """Ten gradients: of A the first two, of B the next three, of C the last five."""
    return bucket_of(torch.arange(10.0), RANGES)


def numbers(parts: Any) -> list[list[int]]:
    return [part.int().tolist() for part in parts]


def viewed(pieces: Any) -> list[list[int]]:
    return numbers(view for piece in pieces for view in piece.views)


def test_a_slice_holds_no_more_than_its_bytes(bucket: Any):
    assert numbers(slices(bucket, (), 16, 0, 10)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert numbers(slices(bucket, (), 1000, 0, 10)) == [list(range(10))]


def test_parameters_reduced_in_the_iteration_are_in_no_slice(bucket: Any):
    assert ranges_of(bucket, {B}) == [(2, 5)]
    assert numbers(slices(bucket, {B}, 16, 0, 10)) == [[0, 1], [5, 6, 7, 8], [9]]
    assert numbers(slices(bucket, {A, C}, 16, 0, 10)) == [[2, 3, 4]]
    assert numbers(slices(bucket, {A, B, C}, 16, 0, 10)) == []


def test_slices_of_a_part_begin_and_end_with_it(bucket: Any):
    assert numbers(slices(bucket, (), 16, 1, 7)) == [[1, 2, 3, 4], [5, 6]]
    assert numbers(slices(bucket, {B}, 16, 1, 7)) == [[1], [5, 6]]
    assert numbers(slices(bucket, {B}, 16, 2, 5)) == []


def test_each_gradient_is_scaled_and_handed_over_once(bucket: Any):
    bucket.gradient_scaling_factor = 2.0
    group = group_of(bucket, None)
    chunk = SimpleNamespace(bucket_groups=[group], expert_parallel_bucket_groups=[])
    gradients = StageGradients(chunk, 0)

    def complete(*unfinished: torch.nn.Parameter) -> list[list[int]]:
        return viewed(gradients.complete(set(unfinished)))

    assert complete(B) == [[0, 2], [10, 12, 14, 16, 18]]
    assert complete(B) == []
    assert complete() == [[4, 6, 8]]
    assert complete() == []
    assert viewed(gradients.take(1000)) == [[0, 2], [10, 12, 14, 16, 18], [4, 6, 8]]
    assert viewed(gradients.take(1000)) == []
    assert group.grad_reduce_finished


@pytest.mark.parametrize(
    ("left", "first", "rest"),
    [
        (0, [], [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),
        (4, [[0, 1, 2, 3]], [[4, 5, 6, 7], [8, 9]]),
        (5, [[0, 1, 2, 3], [4]], [[5, 6, 7], [8, 9]]),
        (10, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]], []),
    ],
)
def test_a_part_is_exact_to_the_element(
    bucket: Any, left: int, first: list[list[int]], rest: list[list[int]]
):
    whole = [Piece(((data,),), None, None) for data in slices(bucket, (), 16, 0, 10)]
    assert [viewed(part) for part in split_after(whole, left)] == [first, rest]


def test_what_is_reduced_in_the_iteration_of_one_shard_is_so_of_all(bucket: Any):
    # Shards are 0-4 and 5-9: A is 0 and 1, B is 2 to 4, C is the whole second shard.
    assert in_iteration_offsets(bucket, {A}, 2) == [(0, 2)]
    assert in_iteration_offsets(bucket, {A, B}, 2) == [(0, 5)]
    assert in_iteration_offsets(bucket, {C}, 2) == [(0, 5)]
    assert in_iteration_offsets(bucket, (), 2) == []
    assert in_iteration_offsets(bucket, {B}, 5) == [(0, 2)]  # of the shards 2-3 and 4-5
    assert list(outside([(0, 2)], 5)) == [(2, 5)]
    assert list(outside([(1, 2), (3, 5)], 5)) == [(0, 1), (2, 3)]
    assert list(outside([], 5)) == [(0, 5)]


@pytest.mark.parametrize(
    ("left", "first", "rest"),
    [
        (0, [], [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]),
        (4, [[0, 1], [5, 6]], [[2, 3, 4], [7, 8, 9]]),
        (5, [[0, 1], [5, 6]], [[2, 3, 4], [7, 8, 9]]),  # whole elements of each shard
        (10, [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]], []),
    ],
)
def test_a_part_is_cut_from_every_shard_alike(
    bucket: Any, left: int, first: list[list[int]], rest: list[list[int]]
):
    whole = of_shards(group_of(bucket, None), bucket, 0, 5, Group(2))
    assert [viewed(part) for part in split_after([whole], left)] == [first, rest]


@pytest.mark.gloo
def test_a_part_starts_what_is_complete_before_its_end_and_was_not_started() -> None:
    # C is complete at first: 20 bytes of 40. B and A become so behind the part that ends at 750.
    assert run_distributed(_start_in_parts, 1) == [[8, 0, 12, 8, 12, 0]]


def _start_in_parts() -> list[int]:
    """Return the bytes that each of some steps starts to reduce."""
    started: list[int] = []

    def count(piece: Piece) -> None:
        started[-1] += piece.num_bytes

    watch(Piece, "reduce", count)
    dist.init_process_group("gloo")
    group = group_of(bucket_of(torch.arange(10.0), RANGES), dist.group.WORLD)
    chunk = Chunk(1, 1)
    chunk.bucket_groups, chunk.expert_parallel_bucket_groups = [group], []
    gradients = StageGradients(chunk, 0)
    for end, unfinished in ((200, {A, B}), (200, {A, B}), (750, {A, B}), (700, ()), (1000, ())):
        started.append(0)
        gradients.complete(unfinished)
        gradients.start_until(end)
    gradients.wait()
    assert not gradients.is_running
    started.append(0)
    gradients.start_until(1000)  # nothing is in flight
    dist.destroy_process_group()
    return started


class Chunk(torch.nn.Linear):
    """A model chunk in DDP."""

    force_all_reduce = False
