"""How the process of a rank ends, in one order whichever way it leaves.

1. The ``with`` statements of the run close its threads, sockets and traces, in reverse order,
   before this module is reached.
2. A failure is reported: see `_tell`.
3. Non-daemon threads are joined and exit functions run, as when an interpreter ends.
4. The process ends with its exit code, and the kernel releases process groups and pinned memory.
   The interpreter is not finalized: threads of process groups and of host links still run, and if
   one requests the interpreter's lock during finalization, the process ends by SIGABRT.

An unhandled signal ends the process at once; the kernel closes what it has open.
"""

import atexit
import ctypes
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn, Self

from megatron.fold3d.training.mistakes import script

_PR_SET_PDEATHSIG = 1
_PATIENCE_S = 1.0  # time for all ranks that fail for one reason to say so
_STORE_S = 3.0
_LAST_WORD = "the last word"  # the task of one rank
# Error messages of a rank whose neighbour is gone, or has failed.
_OF_ANOTHER = re.compile(
    r"connection (closed|reset)|broken pipe|timed? ?out|remote process exited|connection refused|"
    r"rank \d+ (has died|failed)|no end within|shut down before it was over",
    re.IGNORECASE,
)
_PLACE = re.compile(r"fold3d: (rank \d+ \(pipeline rank \d+\) was at .+)")


def run(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> NoReturn:
    """Call the main function of a script, and end the process with what it returns."""
    end_children_with_this_process()
    try:
        code = main(argv)
    except SystemExit as left:
        code = _exit_code(left)
    except KeyboardInterrupt:
        traceback.print_exc()
        code = 128 + signal.SIGINT
    except BaseException as error:  # noqa: BLE001  (it ends here)
        _tell(error)
        code = 1
    _end(code)


def tell_failures(opened: ExitStack) -> None:
    """Report failures as `run` does, for a script that does not call `run`.

    The script's own ``sys.excepthook`` still prints its tracebacks. Ctrl-C is left to it.

    Args:
        opened: the contexts of the run. After a failure they close before the error is reported.
    """
    upstream = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.excepthook = upstream
        if isinstance(error, KeyboardInterrupt):
            upstream(kind, error, trace)
            return
        try:
            with opened:
                raise error
        except BaseException as last:  # noqa: BLE001  (it ends here)
            if last is error:
                error.__traceback__ = trace  # without this function
            _tell(last)  # torchrun's error file gets the traceback of what is being handled

    sys.excepthook = hook


def end_with_parent(parent: int | None = None) -> None:
    """Have the kernel end this process when its parent ends.

    Otherwise the processes that write checkpoints, and the servers of their queues, would live on.
    Ending them loses nothing: a checkpoint is complete only when the rank itself says so.

    Args:
        parent: its process id, where `multiprocessing` has not started this process.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is None and (started_by := multiprocessing.parent_process()) is not None:
        parent = started_by.pid
    if parent not in (None, os.getppid()):  # it was faster
        os._exit(1)


def end_children_with_this_process() -> None:
    """Do `end_with_parent` in what the main thread forks from now on.

    What another thread forks is left alone: to the kernel its parent is that thread.
    """
    by_main_thread = False

    def before() -> None:
        nonlocal by_main_thread
        by_main_thread = threading.current_thread() is threading.main_thread()

    def in_child() -> None:
        if by_main_thread:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    os.register_at_fork(before=before, after_in_child=in_child)


def _end(code: int) -> NoReturn:
    threading._shutdown()  # type: ignore[attr-defined]  # what multiprocessing calls here, too
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def _exit_code(left: SystemExit) -> int:
    if left.code is None or isinstance(left.code, int):
        return left.code or 0
    sys.stderr.write(f"{left.code}\n")
    return 1


def _tell(error: BaseException) -> None:
    """Print an error; the last line of the job, by one rank, names the first failure.

    A rank that fails because of another rank says so in one line; its traceback is in torchrun's
    error file. It prints the traceback only if no rank has reported before it, for example because
    the other was killed. It then waits, so that the launcher, which ends all ranks with the first,
    sees the other rank end first. A rank that notices only then adds nothing behind the last line.
    """
    from torch.distributed.elastic.multiprocessing import errors

    with suppress(OSError, ValueError):
        sys.stdout.flush()  # what was printed before stands above
    mine, job = _Report.of(error), _Job()
    is_first = job.report(mine)
    if mine.is_cause:
        sys.excepthook(type(error), error, error.__traceback__)
        errors.get_error_handler().record_exception(error)
        return
    if is_first:
        sys.excepthook(type(error), error, error.__traceback__)
    elif not job.count(_LAST_WORD, 0):
        _say(mine.text)
    time.sleep(_PATIENCE_S)
    summary = job.summary(mine)
    error.add_note(f"fold3d: {summary}")
    errors.get_error_handler().record_exception(error)
    if job.count(_LAST_WORD) == 1:
        _say(summary)


def _say(text: str) -> None:
    sys.stderr.write(f"{script()}: error: {text}\n")
    sys.stderr.flush()


@dataclass(frozen=True, slots=True)
class _Report:
    """One rank's report of its failure.

    Attributes:
        text: names the rank that failed, which may be another, where it was, and why.
        names_cause: whether the text names the original failure.
        is_cause: whether this rank is the one that failed first.
    """

    rank: int
    text: str
    names_cause: bool
    is_cause: bool

    @classmethod
    def of(cls, error: BaseException) -> Self:
        rank = failed = int(os.environ.get("RANK", "0"))
        names, reason = [type(error).__name__], (str(error).splitlines() or [""])[0]
        names_cause = not _OF_ANOTHER.search(reason)
        if names == ["CheckpointException"]:  # all ranks raise torch's; not all know whose it is
            failures = getattr(error, "failures", {})
            names_cause = bool(failures)
            if failures:
                failed = min(failures)
                cause = failures[failed][0]
                names.append(type(cause).__name__)
                reason = (str(cause).splitlines() or [""])[0]
        notes = getattr(error, "__notes__", ()) if failed == rank else ()
        places = (place[1] for note in notes if (place := _PLACE.fullmatch(note)))
        text = ": ".join(filter(None, (next(places, f"rank {failed}"), *names, reason)))
        return cls(rank, text, names_cause, is_cause=names_cause and failed == rank)


class _Job:
    """The failures that a job's ranks have reported, in the store of the job's launcher.

    Where the store is gone each rank knows of itself alone.
    """

    def __init__(self) -> None:
        self._store: Any = self._ask(lambda: meeting_point("failures", _STORE_S), None)

    def report(self, mine: _Report) -> bool:
        """Report a failure to the others; return True if this rank's is the first."""
        word = json.dumps([mine.rank, mine.text, mine.names_cause, mine.is_cause])
        order = self.count("failures")
        self._ask(lambda: self._store.set(f"failure {order}", word), None)
        return order == 1

    def summary(self, mine: _Report) -> str:
        """Name the first failure that no other rank caused; without one, the first failure."""
        nothing: list[_Report] = []
        reports = self._ask(self._reports, nothing) or [mine]
        first = next((report for report in reports if report.names_cause), None)
        if first is not None:
            return f"the first to fail was {first.text}"
        said = {report.rank for report in reports}
        ranks = range(int(os.environ.get("WORLD_SIZE", "1")))
        silent = ", ".join(f"rank {rank}" for rank in ranks if rank not in said)
        heard = f"; nothing was heard of {silent}" if silent else ""
        return f"the first to notice was {reports[0].text}{heard}"

    def count(self, task: str, own: int = 1) -> int:
        """Return how many ranks have taken a task; this one takes it, unless ``own`` is 0."""
        return self._ask(lambda: int(self._store.add(task, own)), own)

    def _reports(self) -> list[_Report]:
        there = range(1, int(self._store.add("failures", 0)) + 1)
        return [_Report(*json.loads(self._store.get(f"failure {order}"))) for order in there]

    def _ask[Answer](self, question: Callable[[], Answer], otherwise: Answer) -> Answer:
        try:
            return question()
        except (RuntimeError, AttributeError, KeyError, ValueError):  # the store, or its address
            return otherwise


def meeting_point(name: str, timeout_s: float = 300.0) -> Any:
    """Return a part of torchrun's store that nothing else uses, not even a restart of the job.

    It has a connection of its own: a thread may wait on the one that the process groups use.
    """
    from torch import distributed

    store = distributed.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        timeout=timedelta(seconds=timeout_s),
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return distributed.PrefixStore(f"fold3d/{attempt}/{name}", store)  # type: ignore[attr-defined]
