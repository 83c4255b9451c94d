"""How much is reduced at once, and which messages slow a ring down in one direction alone.

A slice is small beside a transfer, but not so small that starting it costs.
"""

import pytest

from megatron.fold3d.policy.grad_sync_cuts import RING_BUFFER_BYTES, rings_are_buffered, slice_bytes

MOST = 1 << 20
S_PER_BYTE = 80e-9  # 100 Mb/s


@pytest.mark.parametrize(
    ("transfer_bytes", "per_byte_s", "start_s", "num_bytes"),
    [
        (1 << 20, S_PER_BYTE, 0.1e-3, 1 << 18),  # a quarter; 2% of its 21 ms would be 0.4 ms
        (32 << 10, S_PER_BYTE, 0.1e-3, 1 << 16),  # at least 64 KiB, of which 2% are 0.105 ms
        (32 << 10, S_PER_BYTE, 0.2e-3, 1 << 17),  # 125,000 bytes take 50 times that
        (1 << 20, S_PER_BYTE, 0.5e-3, 1 << 19),  # 312,500 bytes do
        (1 << 20, 1e-9, 0.2e-3, MOST),  # a fast link: the most there may be
        (8 << 20, S_PER_BYTE, 0.1e-3, MOST),
        (100_000_000, S_PER_BYTE, 0.1e-3, MOST),
        (8 << 20, 0.0, 1e-4, MOST),  # one replica reduces nothing
    ],
)
def test_a_slice_is_a_quarter_of_a_transfer_unless_starting_it_costs_too_much(
    transfer_bytes: int, per_byte_s: float, start_s: float, num_bytes: int
) -> None:
    assert slice_bytes(transfer_bytes, MOST, per_byte_s, start_s) == num_bytes


@pytest.mark.parametrize("backend", RING_BUFFER_BYTES)
def test_a_message_that_fits_into_the_buffers_does(backend: str):
    size = RING_BUFFER_BYTES[backend]
    assert rings_are_buffered(size, backend)
    assert not rings_are_buffered(size + 1, backend)


def test_of_an_unknown_library_nothing_is_assumed():
    assert not rings_are_buffered(1, "mpi")
