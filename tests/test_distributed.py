"""The harness of distributed tests keeps its own promises."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.distributed import RankError, run_distributed

pytestmark = pytest.mark.gloo


def _hang_on_rank_one(folder: Path) -> None:
    (folder / os.environ["RANK"]).write_text(str(os.getpid()))
    if os.environ["RANK"] == "1":
        _wait_for_ever()


def _wait_for_ever() -> None:
    threading.Event().wait()


def test_a_hang_ends_with_every_stack_after_the_timeout(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"(?s)not finished.*ranks 1\b.*\[rank 1\].*_wait_for_ever"):
        run_distributed(_hang_on_rank_one, 2, tmp_path, timeout_s=3)
    _assert_gone(tmp_path)


def _run_and_hang(folder: Path) -> None:
    run_distributed(_hang_on_rank_one, 2, folder)


def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    # A pytest that is killed, say: here a process in between, so that this one can watch.
    # Its ranks need nothing of Megatron's.
    code = (
        "import pathlib, sys; from tests import distributed, test_distributed; "
        "distributed._PRELOAD = ('torch', 'pytest'); "
        "test_distributed._run_and_hang(pathlib.Path(sys.argv[1]))"
    )
    between = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    try:
        while (
            sum(bool(file.read_text()) for file in tmp_path.iterdir()) < 2
            and between.poll() is None
        ):
            time.sleep(0.1)
    finally:
        between.kill()
        between.wait()
    _assert_gone(tmp_path)


def _assert_gone(folder: Path) -> None:
    pids = [int(file.read_text()) for file in folder.iterdir()]
    assert len(pids) == 2
    deadline = time.monotonic() + 60
    while any(map(_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_exists, pids))


def _exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
