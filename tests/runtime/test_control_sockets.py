"""A rank's control socket takes the job's ranks, whoever else calls and whatever they say."""

import asyncio
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from megatron.fold3d.runtime.preemption import control_sockets
from megatron.fold3d.runtime.preemption.control_sockets import _HELLO

TOKEN = secrets.token_bytes(16)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


@pytest.fixture
def callers(listener: socket.socket) -> Iterator["Callers"]:
    with ExitStack() as stack:
        yield Callers(listener, stack)


def accept(*args: Any) -> dict[int, socket.socket]:
    return asyncio.run(control_sockets.accept(*args))


class Callers:
    def __init__(self, listener: socket.socket, stack: ExitStack) -> None:
        self.address, self.stack = listener.getsockname(), stack

    def call(self, said: bytes = b"") -> socket.socket:
        caller = self.stack.enter_context(socket.create_connection(self.address, timeout=10))
        caller.sendall(said)
        return caller


def is_turned_away(caller: socket.socket) -> bool:
    try:
        return caller.recv(1) == b""
    except ConnectionResetError:
        return True


def test_only_ranks_with_the_token_are_let_in(listener: socket.socket, callers: Callers) -> None:
    strangers = [
        callers.call(_HELLO.pack(secrets.token_bytes(16), 1)),  # another token
        callers.call(_HELLO.pack(TOKEN, 7)),  # not one that is waited for
        callers.call(b"GET / HTTP/1.1\r\nHost: rank0\r\n\r\n"),
        callers.call(b"\x00" * 100_000),
    ]
    half_open = [callers.call(), callers.call(TOKEN)]
    callers.call().close()
    ours = {rank: callers.call(_HELLO.pack(TOKEN, rank)) for rank in (2, 1)}
    again = callers.call(_HELLO.pack(TOKEN, 2))

    known = accept(listener, TOKEN, {1, 2}, 10.0)

    assert known.keys() == {1, 2}
    for rank, made in known.items():
        with made:
            assert made.getpeername() == ours[rank].getsockname()
    assert all(is_turned_away(caller) for caller in (*strangers, *half_open))
    assert again.fileno() > 0  # it stays in the listener's queue, which nobody reads


def test_a_hello_may_come_in_pieces(listener: socket.socket, callers: Callers) -> None:
    hello, caller = _HELLO.pack(TOKEN, 3), callers.call()

    def say() -> None:  # in one thread, as the order of several is open
        for byte in hello:
            caller.sendall(bytes([byte]))
            time.sleep(0.01)

    thread = threading.Thread(target=say)
    thread.start()
    accept(listener, TOKEN, {3}, 60.0)[3].close()
    thread.join()


def test_a_flood_of_silent_callers_keeps_no_rank_out(
    listener: socket.socket, callers: Callers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_sockets, "_MOST_CALLERS", 8)

    def flood() -> None:
        for _ in range(60):
            callers.call()
        callers.call(_HELLO.pack(TOKEN, 1))
        with suppress(OSError):  # nobody listens any more
            for _ in range(60):
                callers.call()

    thread = threading.Thread(target=flood)
    thread.start()
    accept(listener, TOKEN, {1}, 10.0)[1].close()
    listener.close()
    thread.join()


@pytest.mark.slow
def test_a_caller_that_says_nothing_is_turned_away_in_time(
    listener: socket.socket, callers: Callers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_sockets, "_HELLO_S", 0.05)
    silent = callers.call()
    with pytest.raises(TimeoutError, match="from rank 1, 4 after 1 s; do all nodes reach 127"):
        accept(listener, TOKEN, {4, 1}, 1.2)
    assert is_turned_away(silent)


def test_a_rank_listens_on_one_address_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert control_sockets._own_address() == "127.0.0.1"
