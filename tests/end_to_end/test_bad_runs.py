"""Mistakes and faults, through the command line that users type: short, clear, and never a hang."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed import RankError, run_distributed
from tests.end_to_end.test_equal_to_stock import Row
from tests.end_to_end.training import train, watch

pytestmark = pytest.mark.gloo

ROOT = Path(__file__).parents[2]
ABSENT = ROOT / "tests/absent"  # packages that a job may lack, and starts faster without
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ROW = Row()
AIAO = "--schedule aiao"
MARK = "FOLD3D_TEST_JOB"  # in the environment of all processes that a job starts
_marks: dict[int, str] = {}  # by the launcher's process id
TIMEOUT_S = 240  # far less than the ten minutes in which a job's transfers time out


@contextlib.contextmanager
def _torchrun(argv: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Start two ranks as a user does; whatever happens, they are gone afterwards."""
    mark = uuid.uuid4().hex
    job = subprocess.Popen(
        [sys.executable, *LAUNCHER, str(ROOT / "pretrain_gpt.py"), *argv],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ABSENT}{os.pathsep}{ROOT}", MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    _marks[job.pid] = mark
    try:
        yield job
    finally:
        for pid in _processes(job):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.wait()


def _processes(job: subprocess.Popen[str]) -> list[int]:
    """Return the process ids of all that a job has started, whoever is their parent now."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if f"{MARK}={_marks[job.pid]}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def _ranks(job: subprocess.Popen[str]) -> list[int]:
    """Return the process ids of a job's ranks."""
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children")
    return [int(pid) for pid in children.read_text().split()] if children.exists() else []


def test_missing_data_is_refused() -> None:
    argv = [word for word in ROW.command(AIAO) if word != "--mock-data"]
    said = said_by_refused(_refusal_and_log, [*argv, "--data-path", "1.0", "/nowhere/corpus"])
    assert "no data at /nowhere/corpus: --data-path takes" in said
    assert "arguments ---" not in said  # before Megatron prints its eight hundred


def _refusal_and_log(argv: Sequence[str]) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as log:
        code, said = _refusal(argv)
    return code, said + log.getvalue()


def test_a_missing_package_is_named_before_training() -> None:
    argv = Row(pp=1, dp=2, segments=1).command(
        "--schedule stock --use-distributed-optimizer --num-distributed-optimizer-instances 2"
    )
    said = said_by_refused(_refusal_without_einops, argv)
    _check_message(said, "--num-distributed-optimizer-instances 2: .*pip install einops")


def _refusal_without_einops(argv: Sequence[str]) -> tuple[int, str]:
    from megatron.fold3d.training import pretraining

    find_spec = pretraining.find_spec
    pretraining.find_spec = lambda name: None if name == "einops" else find_spec(name)
    return _refusal(argv)


def test_what_megatron_says_of_its_optimizers_flags_is_a_refusal() -> None:
    """It looks at them when it is about to train."""
    _refused(
        Row(segments=1).command(f"{AIAO} --exp-avg-dtype bf16"),
        "exp_avg_dtype can only be fp32 when",
    )


def test_groups_of_ours_take_the_timeout_that_megatron_changes_to() -> None:
    """Transfers and DP.sync have groups of their own, which Megatron does not make."""
    ours = "--schedule aiao:step=next --overlap-grad-reduce --lazy-inter-segment"
    argv = Row(dp=2).command(f"{ours} --distributed-timeout-seconds-after-init 1000")
    assert set().union(*run_distributed(_timeouts_s, 4, argv)) == {1000.0}


def _timeouts_s(argv: Sequence[str]) -> set[float]:
    """Train; return the seconds in which this rank's groups of several ranks would give up."""
    from megatron.fold3d.runtime.grad_sync.bucket_groups import timeout_of

    train(argv)
    groups = dist.distributed_c10d._world.pg_map
    return {timeout_of(group).total_seconds() for group in groups if group.size() > 1}


def _refused(argv: Sequence[str], reason: str) -> None:
    _check_message(said_by_refused(_refusal, argv), reason)


def said_by_refused(run: Callable[..., tuple[int, str]], *args: Any) -> str:
    """Run what two ranks refuse, each with exit code 2; returns what the first says."""
    (code, said), (other, _) = run_distributed(run, 2, *args)
    assert (code, other) == (2, 2)
    return said


def _refusal(argv: Sequence[str]) -> tuple[int, str]:
    """Return the script's exit code on this rank, and what it says."""
    import pretrain_gpt
    from megatron.fold3d.training import mistakes

    mistakes.PATIENCE_S = 0.0  # no launcher ends this rank before, because another has spoken
    sys.argv[0] = "pretrain_gpt.py"
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = pretrain_gpt.main(argv)
    return code, said.getvalue()


def _check_message(said: str, reason: str) -> None:
    """Assert that one rank has said what is wrong, and no rank has shown where."""
    assert len(re.findall(r"^pretrain_gpt.py: error: .*$", said, re.MULTILINE)) == 1, said
    assert re.search(reason, said), said
    assert "Traceback" not in said, said


@pytest.mark.stress
def test_a_refusal_ends_a_job_of_torchrun() -> None:
    with _torchrun(ROW.command("--schedule 1f1b")) as job:
        output, _ = job.communicate(timeout=TIMEOUT_S)
    ours, *_launchers = re.split("torch.distributed.elastic", output)
    assert job.returncode != 0
    _check_message(ours, "2 segments with --schedule 1f1b")  # torchrun has a traceback of its own
    *_, last = (line for line in output.splitlines() if line.strip("="))
    assert "pretrain_gpt.py: error: 2 segments with --schedule 1f1b" in last


def test_a_killed_rank_ends_the_job_and_all_its_processes(tmp_path: Path) -> None:
    """Processes that write checkpoints belong to no group that the launcher ends."""
    saves = f"--async-save --save {tmp_path} --save-interval 1 --ckpt-format torch_dist"
    argv = [*ROW.command(AIAO), "--train-iters", "100000", "--log-interval", "1", *saves.split()]
    with _torchrun(argv) as job:
        assert job.stdout is not None
        next(line for line in job.stdout if "iteration        3/" in line)
        ranks, processes = _ranks(job), _processes(job)
        assert len(processes) > len(ranks) + 1  # servers of the writers' queues
        os.kill(ranks[1], signal.SIGKILL)
        output, _ = job.communicate(timeout=TIMEOUT_S)
        assert job.returncode != 0
        end_s = time.monotonic() + 10
        while left := _processes(job):
            assert time.monotonic() < end_s, f"{left} of {processes}\n{output}"
            time.sleep(0.1)
    # The launcher says of the rank that was killed what the kernel told it.
    assert re.search(r"Root Cause.*exitcode *: -9", output, re.DOTALL), output


PAIRED = Row(pp=1, tp=2, segments=1)
PAIRS = "--schedule afab:pairs=on"


def test_an_error_in_the_second_micro_batch_of_a_pair_names_it() -> None:
    with pytest.raises(RankError, match="out of memory") as caught:
        run_distributed(_fail_in_fourth_micro_batch, 2, PAIRED.command(PAIRS))
    assert _places(caught.value, rank=1, pipeline_rank=0) == ["0F3"]
    assert len(_places(caught.value, rank=0)) == 1


def _fail_in_fourth_micro_batch(argv: Sequence[str]) -> None:
    """Train, but on rank 1 fail behind the first layer of the second pair's second micro-batch."""
    from megatron.core.transformer import transformer_layer

    calls = count(1)

    def fail(*_: object, **__: object) -> None:
        # Two micro-batches have passed four layers, and two the first.
        if next(calls) == 2 * 4 + 2:
            raise RuntimeError("out of memory")

    if os.environ["RANK"] == "1":
        watch(transformer_layer.TransformerLayer, "forward", after=fail)
    train(argv)


def _places(error: RankError, rank: int, pipeline_rank: int | None = None) -> list[str]:
    """Return the actions that a rank's error names; its pipeline rank is the same by default."""
    number = rank if pipeline_rank is None else pipeline_rank
    place = rf"^fold3d: rank {rank} \(pipeline rank {number}\) was at (\d+[A-Z_]+\d*)$"
    return [
        action
        for failure in error.failures
        if failure.rank == rank
        for action in re.findall(place, failure.text, re.MULTILINE)
    ]
