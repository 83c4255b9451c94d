"""The processes of a run's ranks: wait for them together, hurry them, stop them."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

_GRACE_S = 5.0  # for the ranks to print their own error after one of them has failed
_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1  # of Linux's <sys/prctl.h>


class Process(Protocol):
    """What is asked of a rank's process; `subprocess.Popen` answers it."""

    pid: int

    def poll(self) -> int | None:
        """Exit code; None while it runs."""

    def wait(self) -> object:
        """Return when it has ended."""


class Ranks:
    """Processes of one run, in the order of their ranks; `Testbed.start` and `fork` make them."""

    def __init__(self, processes: Sequence[Process], logs: Sequence[Path]) -> None:
        self.processes = processes
        self.logs = logs

    def wait(self, timeout_s: float, watch: Callable[[], None] = lambda: None) -> list[int | None]:
        """Exit codes by rank; None for one that was stopped.

        The ranks are stopped when the time is over, and a few seconds after one of them has failed.
        ``watch`` is called again and again in the meantime.
        """
        end_s, failed = time.monotonic() + timeout_s, False
        codes = self.poll()
        while None in codes and time.monotonic() < end_s:
            if not failed and any(codes):
                end_s, failed = min(end_s, time.monotonic() + _GRACE_S), True
            watch()
            time.sleep(_POLL_S)
            codes = self.poll()
        self.stop()
        return codes

    def poll(self) -> list[int | None]:
        """Exit codes by rank; None for one that runs."""
        return [process.poll() for process in self.processes]

    def hurry(self) -> None:
        """Let what runs now go before all other processes of this machine."""
        for process in self.processes:
            hurry(process.pid)

    def stop(self) -> None:
        """Kill what still runs, each rank with the processes that it started."""
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # every rank leads a group
        for process in self.processes:
            process.wait()


class Forked:
    """A copy of this process on a host of the testbed, or where this process is."""

    def __init__(
        self,
        namespace: str | None,
        environment: Mapping[str, str],
        log: Path,
        function: Callable[[], int],
    ) -> None:
        def run() -> None:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if namespace is not None:
                with Path(namespace).open() as host:
                    os.setns(host.fileno(), os.CLONE_NEWNET)
            with log.open("wb", buffering=0) as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            sys.stdout, sys.stderr = (os.fdopen(fd, "w", 1, closefd=False) for fd in (1, 2))
            os.environ.update(environment)
            warnings.simplefilter("ignore")
            sys.exit(function())

        self._process = multiprocessing.get_context("fork").Process(target=run)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        with contextlib.suppress(ProcessLookupError):
            os.setpgid(self.pid, self.pid)  # before anybody kills the group

    def poll(self) -> int | None:
        """Exit code; None while it runs."""
        return self._process.exitcode

    def wait(self) -> None:
        """Return when it has ended."""
        self._process.join()


def hurry(pid: int) -> None:
    """Let every thread that a process has now go before all other processes of this machine.

    All get one priority, in turn: gloo's thread polls while another thread holds a lock that it
    needs, and above that thread it would poll for ever. Threads started later inherit it.
    """
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setscheduler(int(task.name), os.SCHED_RR, os.sched_param(1))


def sleep_until(moment_s: float) -> None:
    """Return at a moment of the monotonic clock, or at once if it is over."""
    if (left_s := moment_s - time.monotonic()) > 0:
        time.sleep(left_s)


def check_real_time(asked: str) -> None:
    """Find out on this thread whether `hurry`, which something asks for, will work.

    Raises:
        ValueError: the kernel refuses it.
    """
    policy, priority = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        raise ValueError(
            f"{asked}: this process may not go before all others; the machine's own root may, "
            "but not the root that unshare makes of a user"
        ) from None
    os.sched_setscheduler(0, policy, priority)
