"""How ranks leave: exit codes, and the one word that names the first failure."""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import pytest

from megatron.fold3d.training import leaving
from tests.distributed import run_distributed

pytestmark = pytest.mark.gloo

GONE = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:10648"


@pytest.mark.parametrize(
    ("ends", "code"), [("return 0", 0), ("exit", 0), ("exit with 3", 3), ("words", 1)]
)
def test_exit_codes_are_those_of_an_interpreter(ends: str, code: int, tmp_path: Path) -> None:
    assert run_distributed(_exit, 1, ends, tmp_path / "said") == [code]
    assert (tmp_path / "said").read_text() == ("no such file\n" if ends == "words" else "")


def test_the_failure_that_caused_the_others_is_named_once_and_last(tmp_path: Path) -> None:
    assert run_distributed(_fail, 3, tmp_path, {1: "out of memory", 0: GONE, 2: GONE}) == [1] * 3
    said = _said(tmp_path, 3)
    cause = "rank 1 (pipeline rank 1) was at 2B1: RuntimeError: out of memory"
    assert "Traceback" in said[1]
    assert "Traceback" not in said[0] + said[2]
    assert [text.count(f"error: the first to fail was {cause}") for text in said].count(1) == 1
    for rank in (0, 2):
        assert said[rank].startswith(f"pretrain_gpt.py: error: rank {rank} (pipeline rank {rank}) ")
        recorded = (tmp_path / f"errors{rank}").read_text()
        assert f"the first to fail was {cause}" in recorded
    assert "2B1" in (tmp_path / "errors1").read_text()


def test_a_script_that_does_not_leave_through_us_tells_its_failure_alike(tmp_path: Path) -> None:
    reasons = {0: GONE, 1: "out of memory"}
    assert run_distributed(_fail, 2, tmp_path, reasons, True) == [1, 1]
    said = _said(tmp_path, 2)
    assert "Traceback" in said[1]
    assert "Traceback" not in said[0]
    last = said[0].splitlines()[-1]
    cause = "rank 1 (pipeline rank 1) was at 2B1: RuntimeError: out of memory"
    assert last == f"pretrain_gpt.py: error: the first to fail was {cause}"
    assert f"the first to fail was {cause}" in (tmp_path / "errors0").read_text()
    assert said[1].startswith("closed after RuntimeError\n")  # what was open, before it is told
    recorded = json.loads((tmp_path / "errors1").read_text())["message"]["extraInfo"]
    assert "RuntimeError: out of memory" in recorded["py_callstack"]  # torchrun prints it last
    assert "out of memory" in (tmp_path / "errors1").read_text()


# A transfer, and preemptible ones: one does not end, one was left.
@pytest.mark.parametrize(
    "noticed",
    [
        GONE,
        "send to rank 1: no end within 600 s of its start",
        "reduce-scatter 25 over ranks [0, 1]: shut down before it was over",
    ],
)
def test_where_a_rank_was_killed_the_one_that_is_silent_is_named(
    noticed: str, tmp_path: Path
) -> None:
    assert run_distributed(_fail, 3, tmp_path, {0: noticed, 2: noticed}) == [1, -9, 1]
    said = _said(tmp_path, 3)
    assert sum("Traceback" in text for text in said) == 1
    last = [text.splitlines()[-1] for text in said if "first to notice" in text]
    assert len(last) == 1
    assert last[0].endswith("; nothing was heard of rank 1")


@pytest.mark.parametrize("failed", [0, 1])
def test_the_rank_that_could_not_save_is_named_by_the_one_that_knows(
    failed: int, tmp_path: Path
) -> None:
    """Torch raises on all ranks; of a save, only rank 0 learns which rank it was."""
    assert run_distributed(_fail_to_save, 3, tmp_path, failed) == [1] * 3
    said = _said(tmp_path, 3)
    where = " (pipeline rank 0) was at 2B1" if failed == 0 else ""  # rank 0 knows where it was
    word = f"error: the first to fail was rank {failed}{where}: "
    assert sum(word in text for text in said) == 1
    (speaker,) = (text for text in said if word in text)
    assert speaker.splitlines()[-1].endswith("CheckpointException: OSError: no space left")
    assert sum("Traceback (most" in text for text in said) >= 1


def _fail_to_save(folder: Path, failed: int) -> int:
    from torch.distributed.checkpoint import CheckpointException

    cause = (OSError("no space left"), None)
    failures = {failed: cause} if os.environ["RANK"] == "0" else {}
    return _fail_with(folder, CheckpointException("write", failures), num_failing=3)


def test_a_rank_that_notices_late_adds_nothing_behind_the_last_line(tmp_path: Path) -> None:
    assert run_distributed(_fail_after_the_last_word, 3, tmp_path) == [1] * 3
    cause, last, late = _said(tmp_path, 3)
    assert cause.splitlines()[-2].endswith("RuntimeError: disk is full")
    assert "error: the first to fail was rank 0" in last.splitlines()[-1]
    assert late == ""


def _fail_after_the_last_word(folder: Path) -> int:
    """Fail in the order of ranks: the cause, who speaks last, and who notices when that is gone."""
    rank = int(os.environ["RANK"])
    error = RuntimeError("disk is full" if rank == 0 else GONE)
    waits = ("", "failures", leaving._LAST_WORD)[rank]
    return _fail_with(folder, error, num_failing=3, waits=waits)


def _said(folder: Path, num_ranks: int) -> list[str]:
    return [(folder / f"said{rank}").read_text() for rank in range(num_ranks)]


def _exit(ends: str, said: Path) -> int:
    def main(_: Sequence[str]) -> int:
        if ends == "return 0":
            return 0
        sys.exit({"exit": None, "exit with 3": 3, "words": "no such file"}[ends])

    return _leave(main, said)


def _fail(folder: Path, reasons: dict[int, str], by_hook: bool = False) -> int:
    """End a process of this rank with an error, those of the cause first, or by a signal."""
    rank = int(os.environ["RANK"])
    error = RuntimeError(reasons[rank]) if rank in reasons else None
    waits = "failures" if reasons.get(rank) == GONE and {*reasons.values()} != {GONE} else ""
    return _fail_with(folder, error, num_failing=len(reasons), waits=waits, by_hook=by_hook)


def _fail_with(
    folder: Path,
    error: BaseException | None,
    *,
    num_failing: int,
    waits: str = "",
    by_hook: bool = False,
) -> int:
    """End a process as above once all that fail are about to; ``waits`` names what to wait for."""
    rank = int(os.environ["RANK"])
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / f"errors{rank}")

    def main(_: Sequence[str]) -> int:
        if error is None:
            os.kill(os.getpid(), 9)
        store = leaving.meeting_point("failures", 3.0)
        _wait_for(store, "about to fail", num_failing, counts=1)
        if waits:
            _wait_for(store, waits, 1)
        error.add_note(f"fold3d: rank {rank} (pipeline rank {rank}) was at 2B1")
        raise error

    sys.argv[0] = "pretrain_gpt.py"
    return _leave(main, folder / f"said{rank}", by_hook)


def _wait_for(store: Any, name: str, number: int, counts: int = 0) -> None:
    """Wait until ranks have counted as far as a number."""
    store.add(name, counts)
    while store.add(name, 0) < number:
        time.sleep(0.01)


def _leave(main: Callable[[Sequence[str]], int], said: Path, by_hook: bool = False) -> int:
    """Return the exit code of a process that runs ``main``; its errors go to a file."""
    child = os.fork()
    if child == 0:
        try:
            sys.stderr = said.open("w")
            sys.excepthook = sys.__excepthook__
            if by_hook:
                _leave_by_hook(main)
            leaving.run(main, ())
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _leave_by_hook(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """End as an interpreter does whose script failed: nothing is being handled any more."""

    def close(kind: type[BaseException] | None, *_: object) -> None:
        sys.stderr.write(f"closed after {kind and kind.__name__}\n")

    opened = ExitStack()
    opened.push(close)
    leaving.tell_failures(opened)
    with pytest.raises(RuntimeError) as failed:
        main(())
    sys.excepthook(failed.type, failed.value, failed.tb)
    sys.stderr.flush()
    os._exit(1)
