"""How a model chunk's gradients are cut, on buckets of a few numbers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.fold3d.runtime.grad_sync.deferred_sync import DeferredSync
from megatron.fold3d.runtime.grad_sync.slices import Slice, divide, kept_ranges, slices

A, B, C = (torch.nn.Parameter(torch.zeros(1)) for _ in range(3))


@pytest.fixture
def bucket() -> Any:
    """Ten gradients: of A the first two, of B the next three, of C the last five."""
    ranges = {A: (0, 2), B: (2, 5), C: (5, 10)}
    return SimpleNamespace(grad_data=torch.arange(10.0), params=[C, B, A], param_to_index=ranges)


def numbers(parts: Any) -> list[list[int]]:
    return [part.int().tolist() for part in parts]


def test_a_slice_holds_no_more_than_its_bytes(bucket: Any):
    assert numbers(slices(bucket, (), 16)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert numbers(slices(bucket, (), 1000)) == [list(range(10))]


def test_parameters_reduced_in_the_iteration_are_in_no_slice(bucket: Any):
    assert kept_ranges(bucket, {B}) == [(2, 5)]
    assert numbers(slices(bucket, {B}, 16)) == [[0, 1], [5, 6, 7, 8], [9]]
    assert numbers(slices(bucket, {A, C}, 16)) == [[2, 3, 4]]
    assert numbers(slices(bucket, {A, B, C}, 16)) == []


def test_a_slice_is_a_view_of_the_bucket(bucket: Any):
    for part in slices(bucket, {B}, 16):
        part.zero_()
    assert bucket.grad_data.int().tolist() == [0, 0, 2, 3, 4, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("share", "first", "rest"),
    [
        (0, [], [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),
        (0.4, [[0, 1, 2, 3]], [[4, 5, 6, 7], [8, 9]]),
        (0.5, [[0, 1, 2, 3], [4]], [[5, 6, 7], [8, 9]]),
        (1, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]], []),
    ],
)
def test_a_share_is_exact_to_the_element(
    bucket: Any, share: float, first: list[list[int]], rest: list[list[int]]
):
    whole = [Slice(data, None, None) for data in slices(bucket, (), 16)]
    found = [numbers(part.data for part in parts) for parts in divide(whole, share)]
    assert found == [first, rest]


def test_shares_are_from_0_to_1():
    with pytest.raises(ValueError, match="give numbers from 0 to 1"):
        DeferredSync(0.5, slice_bytes=4096, bounded=False, timeout=None).set_shares((0.5, 1.5))
