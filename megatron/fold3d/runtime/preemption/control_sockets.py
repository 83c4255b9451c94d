"""TCP connections between ranks for control messages, made once when all ranks are there.

Keeps two invariants. A rank listens as long as its process lives, so a refused connection means
that it has died. A rank accepts only connections that show its token, which it gives to the ranks
of its job; all others are closed, however many they are and even if they send nothing.
"""

import asyncio
import hmac
import os
import secrets
import socket
import struct
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import NoReturn

import torch.distributed as dist

from megatron.fold3d.runtime.agreement import gathered

_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"!{_TOKEN_BYTES}si")  # the token of the rank that listens, and one's rank
_PATIENCE_S = 60.0
_HELLO_S = 10.0  # in which a caller has to say who it is
_MOST_CALLERS = 256  # of the latest, who may still say it; earlier ones are turned away

Card = tuple[str, int, bytes, set[int]]  # address, port, token, neighbours


@contextmanager
def connections(neighbours: Collection[int]) -> Iterator[list[tuple[int, int, str, int]]]:
    """Connect this rank to its neighbours; all ranks of the job do so together.

    Gives (rank, file descriptor, address, port) of each neighbour. At the end of the block this
    rank stops to listen, and counts as gone.

    Raises:
        TimeoutError: a neighbour did not connect.
    """
    rank = dist.get_rank()
    with ExitStack() as opened:
        listener = socket.create_server((_own_address(), 0), backlog=128)
        opened.enter_context(listener)
        token = secrets.token_bytes(_TOKEN_BYTES)
        card: Card = (*listener.getsockname()[:2], token, set(neighbours))
        cards = gathered(card)
        wanted = {
            other
            for other, (_, _, _, its) in enumerate(cards)
            if other != rank and (other in neighbours or rank in its)
        }
        sockets: dict[int, socket.socket] = {}
        for other in sorted(wanted):
            if other < rank:
                address, port, its_token, _ = cards[other]
                made = socket.create_connection((address, port), timeout=_PATIENCE_S)
                made.sendall(_HELLO.pack(its_token, rank))
                sockets[other] = opened.enter_context(made)
        callers = {other for other in wanted if other > rank}
        for other, made in asyncio.run(accept(listener, token, callers, _PATIENCE_S)).items():
            sockets[other] = opened.enter_context(made)
        yield [(other, made.fileno(), *cards[other][:2]) for other, made in sockets.items()]


async def accept(
    listener: socket.socket, token: bytes, ranks: Collection[int], patience_s: float
) -> dict[int, socket.socket]:
    """Return a connection from each of ``ranks``, and turn away all others.

    Raises:
        TimeoutError: not all of them were there after ``patience_s``.
    """
    listener.setblocking(False)
    loop, has_news = asyncio.get_running_loop(), asyncio.Event()
    known: dict[int, socket.socket] = {}
    callers: deque[asyncio.Task[None]] = deque()

    async def hear(caller: socket.socket) -> None:
        said = b""
        with suppress(OSError, struct.error), ExitStack() as unknown:
            unknown.enter_context(caller)
            async with asyncio.timeout(_HELLO_S):
                while more := await loop.sock_recv(caller, _HELLO.size - len(said)):
                    said += more
            its_token, rank = _HELLO.unpack(said)
            waited_for = rank in ranks and rank not in known
            if hmac.compare_digest(its_token, token) and waited_for:
                known[rank] = caller
                unknown.pop_all()
                has_news.set()

    async def let_in() -> NoReturn:
        while True:
            with suppress(OSError):  # it is gone already, or there are no more files
                caller, _ = await loop.sock_accept(listener)
                callers.append(loop.create_task(hear(caller)))
            if len(callers) > _MOST_CALLERS:
                callers.popleft().cancel()
            await asyncio.sleep(0)  # or a flood of callers would keep them from being heard

    door = loop.create_task(let_in())
    try:
        async with asyncio.timeout(patience_s):
            while known.keys() != {*ranks}:
                await has_news.wait()
                has_news.clear()
    except TimeoutError:
        missing = ", ".join(str(rank) for rank in sorted({*ranks} - known.keys()))
        raise TimeoutError(
            f"no control connection from rank {missing} after {patience_s:.0f} s; do all nodes "
            f"reach {listener.getsockname()[0]}?"
        ) from None
    finally:
        door.cancel()
    return known


def _own_address() -> str:
    """Return the address from which this host reaches ``MASTER_ADDR``, for the other ranks."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((os.environ["MASTER_ADDR"], 1))
        address: str = way.getsockname()[0]
        return address
