"""How far one direction of a ring may be ahead of the other, by the library that runs it.

A ring sends and receives at once. If a message takes a part of the link in one direction, the other
goes on as far as the ring's buffers hold what it is ahead. So a message that fits into them slows
the ring down in its own direction alone. Messages that leave a NIC and messages that arrive there
then cost DP.sync the longer of both times, and otherwise their sum.
"""

RING_BUFFER_BYTES = {"nccl": 4 << 20, "gloo": 1 << 30}
"""By torch's name of the backend: ``NCCL_BUFFSIZE``, of one channel; gloo receives into tensors."""


def rings_are_buffered(message_bytes: float, backend: str) -> bool:
    """Return True if a ring's buffers hold what one direction is ahead beside a message.

    Args:
        message_bytes: of one GPU's message.
        backend: torch's name of the library that runs the ring.
    """
    return message_bytes <= RING_BUFFER_BYTES.get(backend, 0)
