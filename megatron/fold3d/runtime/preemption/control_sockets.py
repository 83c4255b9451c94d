"""TCP connections between ranks for control messages, made once when all ranks are there.

Keeps two invariants. A rank listens as long as its process lives, so a refused connection means
that it has died. A rank accepts only connections that show its token, which it gives to the ranks
of its job; all others are closed, however many they are and even if they send nothing.
"""

import hmac
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Collection
from typing import Self

import torch.distributed as dist

_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"!{_TOKEN_BYTES}si")  # the token of the rank that listens, and one's rank
_PATIENCE_S = 60.0
_HELLO_S = 10.0  # in which a caller has to say who it is
_MOST_STRANGERS = 256  # that have not said it; the oldest is turned away for one more

Card = tuple[str, int, bytes, set[int]]  # address, port, token, neighbours


class ControlSockets:
    """Connections of this rank to its neighbours; all ranks of the job make theirs together.

    Attributes:
        connections: (rank, file descriptor, address, port) of each neighbour.

    Raises:
        TimeoutError: a neighbour did not connect.
    """

    def __init__(self, neighbours: Collection[int]) -> None:
        rank = dist.get_rank()
        self._listener = socket.create_server((_own_address(), 0), backlog=128)
        token = secrets.token_bytes(_TOKEN_BYTES)
        card: Card = (*self._listener.getsockname()[:2], token, set(neighbours))
        cards: list[Card] = [card] * dist.get_world_size()
        dist.all_gather_object(cards, card)
        wanted = {
            other
            for other, (_, _, _, its) in enumerate(cards)
            if other != rank and (other in neighbours or rank in its)
        }
        self._sockets: dict[int, socket.socket] = {}
        for other in sorted(wanted):
            if other < rank:
                address, port, its_token, _ = cards[other]
                made = socket.create_connection((address, port), timeout=_PATIENCE_S)
                made.sendall(_HELLO.pack(its_token, rank))
                self._sockets[other] = made
        callers = {other for other in wanted if other > rank}
        self._sockets |= accept(self._listener, token, callers, _PATIENCE_S)
        self.connections = [
            (other, made.fileno(), *cards[other][:2]) for other, made in self._sockets.items()
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop listening: from now on this rank counts as gone."""
        for made in (*self._sockets.values(), self._listener):
            made.close()


def accept(
    listener: socket.socket, token: bytes, ranks: Collection[int], patience_s: float
) -> dict[int, socket.socket]:
    """Return a connection from each of ``ranks``, and turn away all others.

    Raises:
        TimeoutError: not all of them were there after ``patience_s``.
    """
    deadline_s = time.monotonic() + patience_s
    with _Door(listener, token, ranks) as door:
        while missing := sorted(door.ranks - door.known.keys()):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(
                    f"no control connection from rank {', '.join(map(str, missing))} after "
                    f"{patience_s:.0f} s; do all nodes reach {listener.getsockname()[0]}?"
                )
            door.wait(min(1.0, left_s))
        return door.known


class _Door:
    """The callers of a listening socket; closing it closes those that were not expected.

    Attributes:
        ranks: the ranks that may connect.
        known: those of them that have connected.
    """

    def __init__(self, listener: socket.socket, token: bytes, ranks: Collection[int]) -> None:
        self.ranks = frozenset(ranks)
        self.known: dict[int, socket.socket] = {}
        self._listener, self._token = listener, token
        self._said: dict[socket.socket, bytes] = {}  # by callers that are not known yet
        self._until_s: dict[socket.socket, float] = {}
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for caller in [*self._said]:
            self._forget(caller).close()
        self._selector.close()

    def wait(self, timeout_s: float) -> None:
        """Read from callers for at most ``timeout_s``."""
        now_s = time.monotonic()
        for caller in [caller for caller, until_s in self._until_s.items() if until_s < now_s]:
            self._forget(caller).close()
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._open()
            elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._said:
                self._hear(key.fileobj)

    def _open(self) -> None:
        try:
            caller, _ = self._listener.accept()
        except OSError:  # it is gone already, or there are no more files
            return
        if len(self._said) == _MOST_STRANGERS:
            self._forget(next(iter(self._said))).close()
        caller.setblocking(False)
        self._said[caller], self._until_s[caller] = b"", time.monotonic() + _HELLO_S
        self._selector.register(caller, selectors.EVENT_READ)

    def _hear(self, caller: socket.socket) -> None:
        try:
            more = caller.recv(_HELLO.size - len(self._said[caller]))
        except OSError:
            more = b""
        self._said[caller] += more
        if more and len(self._said[caller]) < _HELLO.size:
            return
        rank = self._rank(self._said[caller])
        self._forget(caller)
        if rank is None:
            caller.close()
        else:
            self.known[rank] = caller

    def _rank(self, said: bytes) -> int | None:
        """Return the rank that sent this greeting, or None if it is not one that may connect."""
        if len(said) < _HELLO.size:
            return None
        token, rank = _HELLO.unpack(said)
        waited_for = rank in self.ranks and rank not in self.known
        return int(rank) if hmac.compare_digest(token, self._token) and waited_for else None

    def _forget(self, caller: socket.socket) -> socket.socket:
        self._selector.unregister(caller)
        del self._said[caller], self._until_s[caller]
        return caller


def _own_address() -> str:
    """Return the address from which this host reaches ``MASTER_ADDR``, for the other ranks."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((os.environ["MASTER_ADDR"], 1))
        address: str = way.getsockname()[0]
        return address
