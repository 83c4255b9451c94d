"""Which messages slow a ring down in one direction alone."""

import pytest

from megatron.fold3d.policy.ring_buffers import RING_BUFFER_BYTES, rings_are_buffered


@pytest.mark.parametrize("backend", RING_BUFFER_BYTES)
def test_a_message_that_fits_into_the_buffers_does(backend: str):
    size = RING_BUFFER_BYTES[backend]
    assert rings_are_buffered(size, backend)
    assert not rings_are_buffered(size + 1, backend)


def test_of_an_unknown_library_nothing_is_assumed():
    assert not rings_are_buffered(1, "mpi")
