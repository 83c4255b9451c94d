"""Run a plain function on fresh ranks, as torchrun would, within a time that is always kept.

Ranks are forked from one server that has imported torch and Megatron, seconds of work on each
rank otherwise. The server has no thread when it forks, except OpenBLAS's, which expects forks.

Keeps one invariant: no rank outlives its test, whatever the rank, the test or pytest does.
"""

import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

# What every rank imports sooner or later.
_PRELOAD = (
    "pytest",  # the files of tests
    "torch",
    "megatron.core.datasets.helpers",
    "megatron.core.models.mimo",
    "megatron.core.tokenizers.text.models",  # transformers
    "megatron.fold3d.runtime.executor",
    "megatron.training.training",
    "pretrain_gpt",
    "tests.end_to_end.training",
    "tests.rank_server",  # last
)
_GRACE_S = 5.0  # in which all ranks that fail for one reason have failed, or have dumped a stack
_LOG_LINES = 60


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of a rank: its traceback, or how it died."""

    when: float
    rank: int
    text: str


class RankError(Exception):
    """A test's ranks failed; the message is the first failure, marked with ``[rank N]``."""

    def __init__(self, message: str, failures: Sequence[Failure] = ()) -> None:
        super().__init__(message)
        self.failures = failures


@dataclass(frozen=True, slots=True)
class _Rank:
    rank: int
    process: ForkServerProcess
    connection: Connection
    log: Path
    stack: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None  # it was started
        return self.process.pid

    def outcome(self) -> Any:
        """What the function returned, or a `Failure`."""
        try:
            return self.connection.recv()
        except EOFError:
            self.process.join()
            # An earlier cause than anything another rank may say about it.
            return Failure(0.0, self.rank, f"died with exit code {self.process.exitcode}")

    def close(self) -> None:
        with suppress(ProcessLookupError):  # it may end at any moment
            if self.process.is_alive():
                os.killpg(self.pid, signal.SIGKILL)  # with the workers of its data loaders
        self.process.kill()
        self.process.join()
        self.connection.close()


def run_distributed(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 240.0,
    grace_s: float = _GRACE_S,
) -> list[Any]:
    """Call ``fn(*args)`` on each of ``world_size`` new ranks and return what they return, by rank.

    ``fn`` is a function of a module's top level; ``init_process_group("gloo")`` and Megatron's own
    start-up find the other ranks as under torchrun. What a rank prints is shown when it fails.
    After each failure the others have ``grace_s`` to end by themselves.

    Raises:
        RankError: a rank raised, died, or had not finished after ``timeout_s``.
    """
    sys.audit("tests.run_distributed", fn)  # tests/conftest.py sees which tests start ranks
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOAD))
    # Here and not on rank 0, so that its port is known to be free: torchrun's way.
    store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="ranks-")))
        ranks = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            log, stacks = folder / f"log{rank}", folder / f"stack{rank}"
            environment = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": world_size,
                "LOCAL_WORLD_SIZE": world_size,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": store.port,
                "TORCHELASTIC_USE_AGENT_STORE": True,
                "TORCHELASTIC_RESTART_COUNT": 0,
            }
            process = context.Process(
                target=_run_rank, args=(rank, environment, theirs, log, stacks, fn, args)
            )
            process.start()
            theirs.close()
            ranks.append(_Rank(rank, process, ours, log, stacks))
            stack.callback(ranks[-1].close)
        return _collect(ranks, timeout_s, grace_s)


def _collect(ranks: Sequence[_Rank], timeout_s: float, grace_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    failures: list[Failure] = []
    waiting: dict[Any, _Rank] = {rank.connection: rank for rank in ranks}
    while waiting:
        left_s = grace_s if failures else max(0.0, deadline - time.monotonic())
        ready = wait(list(waiting), left_s)
        if not ready:
            break
        for connection in ready:
            rank = waiting.pop(connection)
            outcome = rank.outcome()
            if isinstance(outcome, Failure):
                failures.append(outcome)
            else:
                results[rank.rank] = outcome
    if failures:
        first = min(failures, key=lambda failure: (failure.when, failure.rank))
        message = _marked(first.rank, first.text) + _last_lines(ranks[first.rank])
        raise RankError(message, failures)
    if waiting:
        late = ", ".join(str(rank.rank) for rank in waiting.values())
        raise RankError(f"not finished after {timeout_s} s: ranks {late}\n" + _stacks(ranks))
    return [results[rank.rank] for rank in ranks]


def _stacks(ranks: Sequence[_Rank]) -> str:
    alive = [rank for rank in ranks if rank.process.is_alive()]
    for rank in alive:
        os.kill(rank.pid, signal.SIGUSR1)
    deadline = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline and not all(_read(rank.stack) for rank in alive):
        time.sleep(0.05)
    time.sleep(0.05)  # the last of them may still be writing
    return "\n".join(
        _marked(rank.rank, _read(rank.stack) or "no stack: not started yet, or stopped")
        if rank in alive
        else _marked(rank.rank, "finished")
        for rank in ranks
    )


def _marked(rank: int, text: str) -> str:
    return "\n".join(f"[rank {rank}] {line}" for line in text.splitlines())


def _read(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""


def _last_lines(rank: _Rank) -> str:
    lines = _read(rank.log).splitlines()[-_LOG_LINES:]
    return "\n\nThe last it printed:\n" + _marked(rank.rank, "\n".join(lines)) if lines else ""


def _run_rank(
    rank: int,
    environment: dict[str, Any],
    connection: Connection,
    log: Path,
    stack: Path,
    fn: Callable[..., Any],
    args: Sequence[Any],
) -> None:
    os.setpgid(0, 0)
    with log.open("wb", buffering=0) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    faulthandler.enable()  # a rank that aborts says where, in its log
    stack_file = stack.open("w")  # open as long as the rank lives
    faulthandler.register(signal.SIGUSR1, stack_file)
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.set_num_threads(1)
    try:
        outcome = fn(*args)
    except BaseException:  # noqa: BLE001  (SystemExit too: the test shall see it)
        outcome = Failure(time.monotonic(), rank, traceback.format_exc())
    connection.send(outcome)


def is_running(pid: int) -> bool:
    """Return whether the process is there, and not merely waiting for its parent to look."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)
