"""TCP connections between ranks for control messages, made once when all ranks are there.

Keeps one invariant: a rank listens as long as its process lives, so a refused connection means that
it has died.
"""

import os
import socket
import struct
from collections.abc import Collection
from typing import Self

import torch.distributed as dist

_RANK = struct.Struct("!i")
_PATIENCE_S = 60.0


class ControlSockets:
    """Connections of this rank to its neighbours; all ranks of the job make theirs together.

    Attributes:
        connections: (rank, file descriptor, address, port) of each neighbour.
    """

    def __init__(self, neighbours: Collection[int]) -> None:
        rank = dist.get_rank()
        self._listener = socket.create_server((_own_address(), 0), backlog=128)
        self._listener.settimeout(_PATIENCE_S)
        card = (*self._listener.getsockname()[:2], set(neighbours))
        cards: list[tuple[str, int, set[int]]] = [card] * dist.get_world_size()
        dist.all_gather_object(cards, card)
        wanted = {
            other
            for other, (_, _, its) in enumerate(cards)
            if other != rank and (other in neighbours or rank in its)
        }
        self._sockets: dict[int, socket.socket] = {}
        for other in sorted(wanted):
            if other < rank:
                made = socket.create_connection(cards[other][:2], timeout=_PATIENCE_S)
                made.sendall(_RANK.pack(rank))
                self._sockets[other] = made
        while len(self._sockets) < len(wanted):
            accepted, _ = self._listener.accept()
            accepted.settimeout(_PATIENCE_S)
            self._sockets[_RANK.unpack(accepted.recv(_RANK.size, socket.MSG_WAITALL))[0]] = accepted
        self.connections = [
            (other, made.fileno(), *cards[other][:2]) for other, made in self._sockets.items()
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop listening: from now on this rank counts as gone."""
        for made in (*self._sockets.values(), self._listener):
            made.close()


def _own_address() -> str:
    """Return this host's address for the other ranks: the one it reaches ``MASTER_ADDR`` from."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((os.environ["MASTER_ADDR"], 1))
        address: str = way.getsockname()[0]
        return address
