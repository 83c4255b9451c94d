"""How ranks leave: exit codes, and the one word that names the first failure."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

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
    cause = "rank 1: pipeline rank 1 was at 2B1: RuntimeError: out of memory"
    assert "Traceback" in said[1]
    assert "Traceback" not in said[0] + said[2]
    assert [text.count(f"error: the first to fail was {cause}") for text in said].count(1) == 1
    for rank in (0, 2):
        assert said[rank].startswith(f"pretrain_gpt.py: error: rank {rank}: pipeline rank {rank} ")
        recorded = (tmp_path / f"errors{rank}").read_text()
        assert f"the first to fail was {cause}" in recorded
    assert "2B1" in (tmp_path / "errors1").read_text()


def test_where_a_rank_was_killed_the_one_that_is_silent_is_named(tmp_path: Path) -> None:
    assert run_distributed(_fail, 3, tmp_path, {0: GONE, 2: GONE}) == [1, -9, 1]
    said = _said(tmp_path, 3)
    assert sum("Traceback" in text for text in said) == 1
    last = [text.splitlines()[-1] for text in said if "first to notice" in text]
    assert len(last) == 1
    assert last[0].endswith("; nothing was heard of rank 1")


def _said(folder: Path, num_ranks: int) -> list[str]:
    return [(folder / f"said{rank}").read_text() for rank in range(num_ranks)]


def _exit(ends: str, said: Path) -> int:
    def main(_: Sequence[str]) -> int:
        if ends == "return 0":
            return 0
        sys.exit({"exit": None, "exit with 3": 3, "words": "no such file"}[ends])

    return _leave(main, said)


def _fail(folder: Path, reasons: dict[int, str]) -> int:
    """End a process of this rank with an error, those of the cause first, or by a signal."""
    rank = int(os.environ["RANK"])
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / f"errors{rank}")

    def main(_: Sequence[str]) -> int:
        if rank not in reasons:
            os.kill(os.getpid(), 9)
        if reasons[rank] == GONE:
            time.sleep(0.5)
        error = RuntimeError(reasons[rank])
        error.add_note(f"fold3d: pipeline rank {rank} was at 2B1")
        raise error

    sys.argv[0] = "pretrain_gpt.py"
    return _leave(main, folder / f"said{rank}")


def _leave(main: Callable[[Sequence[str]], int], said: Path) -> int:
    """Return the exit code of a process that runs ``main``; its errors go to a file."""
    child = os.fork()
    if child == 0:
        try:
            sys.stderr = said.open("w")
            sys.excepthook = sys.__excepthook__
            leaving.run(main, ())
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
