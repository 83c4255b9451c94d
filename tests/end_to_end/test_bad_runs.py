"""Mistakes and faults, through the command line that users type: short, clear, and never a hang."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.distributed import RankError, run_distributed
from tests.end_to_end.test_equal_to_stock import Row
from tests.end_to_end.training import train

pytestmark = pytest.mark.gloo

ROOT = Path(__file__).parents[2]
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ROW = Row(segments=2)
AIAO = "--schedule aiao"


@contextlib.contextmanager
def _torchrun(argv: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Start two ranks as a user does; whatever happens, they are gone afterwards."""
    job = subprocess.Popen(
        [sys.executable, *LAUNCHER, "pretrain_gpt.py", *argv],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield job
    finally:
        for pid in [*_ranks(job), job.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.wait()


def _ranks(job: subprocess.Popen[str]) -> list[int]:
    """Return the process ids of a job's ranks."""
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children")
    return [int(pid) for pid in children.read_text().split()] if children.exists() else []


PLANS = {
    # Rank 1 never receives what rank 0 sends last.
    "an unmatched send": (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n"
        "1RECV_F0 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
        r"SEND_F1|RECV_F1",
    ),
    "another size": ("0F0 0B0\n1F0 1B0", "1 micro-batches.*2 micro-batches"),
}


@pytest.mark.parametrize(("plan", "reason"), PLANS.values(), ids=PLANS)
def test_a_plan_that_cannot_run_is_refused_before_training(
    plan: str, reason: str, tmp_path: Path
) -> None:
    plan_file = tmp_path / "plan.txt"
    plan_file.write_text(plan)
    _refused(Row(m=2).command(f"--plan-file {plan_file}"), reason)


def test_flags_that_do_not_fit_are_refused() -> None:
    _refused(ROW.command("--schedule 1f1b"), "2 segments with --schedule 1f1b")


def test_missing_data_is_refused() -> None:
    argv = [word for word in ROW.command(AIAO) if word != "--mock-data"]
    _refused([*argv, "--data-path", "/nowhere/corpus"], "/nowhere/corpus")


def _refused(argv: Sequence[str], reason: str) -> None:
    with _torchrun(argv) as job:
        output, _ = job.communicate(timeout=120)
    ours, *_launchers = re.split("torch.distributed.elastic", output)
    errors = re.findall(r"^pretrain_gpt.py: error: .*$", output, re.MULTILINE)
    assert job.returncode != 0
    assert len(errors) == 1, output
    assert re.search(reason, ours), output
    assert "Traceback" not in ours, output  # torchrun has one of its own, further down


def test_a_killed_rank_ends_the_job() -> None:
    argv = [*ROW.command(AIAO), "--train-iters", "100000", "--log-interval", "1"]
    with _torchrun(argv) as job:
        assert job.stdout is not None
        next(line for line in job.stdout if "iteration        2/" in line)
        ranks = _ranks(job)
        os.kill(ranks[1], signal.SIGKILL)
        killed = time.monotonic()
        output, _ = job.communicate(timeout=120)
        took_s = time.monotonic() - killed
    assert job.returncode != 0
    assert took_s < 60, output  # the timeout of this job is ten minutes
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


def test_survivors_of_a_killed_rank_name_the_action_they_were_at() -> None:
    with pytest.raises(RankError, match=r"\[rank 1\] died with exit code -9") as caught:
        run_distributed(_end_in_second_iteration, 2, ROW.command(AIAO), signal.SIGKILL)
    assert _places(caught.value, rank=0)


@pytest.mark.skipif(
    os.geteuid() == 0, reason="root has hosts: test_faults.py waits for the same minute there"
)
def test_a_hanging_rank_ends_the_job_when_transfers_time_out() -> None:
    argv = [*ROW.command(AIAO), "--distributed-timeout-minutes", "1"]  # the least Megatron takes
    with pytest.raises(RankError, match=r"\[rank 0\] fold3d: pipeline rank 0 was at") as caught:
        run_distributed(_end_in_second_iteration, 2, argv, signal.SIGSTOP)
    assert _places(caught.value, rank=0)


def _end_in_second_iteration(argv: Sequence[str], with_signal: signal.Signals) -> None:
    """Train, but on rank 1 meet a signal in a forward of the second iteration."""
    from fold3d_patches import gpt

    forward_step, count = gpt.forward_step, 0

    def counting_forward_step(*args: object) -> object:
        nonlocal count
        count += 1
        if count == ROW.segments * ROW.m + 2:
            os.kill(os.getpid(), with_signal)
        return forward_step(*args)

    if os.environ["RANK"] == "1":
        gpt.forward_step = counting_forward_step
    train(argv)


def _places(error: RankError, rank: int) -> list[str]:
    """Return the actions that a rank's error names."""
    place = rf"^fold3d: pipeline rank {rank} was at (\d+[A-Z_]+\d*)$"
    return [
        action
        for failure in error.failures
        if failure.rank == rank
        for action in re.findall(place, failure.text, re.MULTILINE)
    ]
