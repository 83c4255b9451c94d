"""Mistakes and faults, through the command line that users type: short, clear, and never a hang."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
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
TIMEOUT_S = 240  # far less than the ten minutes in which a job's transfers time out


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
    "recomputation ahead of the gradient": (
        "0F0 0F1 0R0 0B0 0R1 0B1\n1F0 1B0 1F1 1B1",
        "found R in the plan; give --recompute-early with its stages",
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


def test_missing_data_is_refused() -> None:
    argv = [word for word in ROW.command(AIAO) if word != "--mock-data"]
    _refused([*argv, "--data-path", "/nowhere/corpus"], "/nowhere/corpus")


def _refused(argv: Sequence[str], reason: str) -> None:
    codes, said = zip(*run_distributed(_refusal, 2, argv), strict=True)
    assert codes == (2, 2)
    _check_message("".join(said), reason)


def _refusal(argv: Sequence[str]) -> tuple[int, str]:
    """Return the script's exit code on this rank, and what it says."""
    import pretrain_gpt
    from megatron.fold3d.training import launch

    launch.PATIENCE_S = 0.0  # no launcher ends this rank because another has spoken
    sys.argv[0] = "pretrain_gpt.py"
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = pretrain_gpt.main(argv)
    return code, said.getvalue()


def _check_message(said: str, reason: str) -> None:
    """Assert that one rank has said what is wrong, and no rank has shown where."""
    assert len(re.findall(r"^pretrain_gpt.py: error: .*$", said, re.MULTILINE)) == 1, said
    assert re.search(reason, said), said
    assert "Traceback" not in said, said


def test_a_refusal_ends_a_job_of_torchrun() -> None:
    with _torchrun(ROW.command("--schedule 1f1b")) as job:
        output, _ = job.communicate(timeout=TIMEOUT_S)
    ours, *_launchers = re.split("torch.distributed.elastic", output)
    assert job.returncode != 0
    _check_message(ours, "2 segments with --schedule 1f1b")  # torchrun has a traceback of its own


def test_a_killed_rank_ends_the_job() -> None:
    argv = [*ROW.command(AIAO), "--train-iters", "100000", "--log-interval", "1"]
    with _torchrun(argv) as job:
        assert job.stdout is not None
        next(line for line in job.stdout if "iteration        2/" in line)
        ranks = _ranks(job)
        os.kill(ranks[1], signal.SIGKILL)
        output, _ = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode != 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks), output


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
    from megatron.fold3d.training import gpt

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
