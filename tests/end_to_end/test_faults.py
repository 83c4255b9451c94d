"""Ranks that die, leave or fall silent while gradients travel: nobody hangs, and errors say where.

Each job runs on a testbed of its own, four hosts with a rank each. All run at the same time, since
one of them has to wait for a minute.
"""

import math
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.testbed import Link, Testbed, TestbedError
from tests.distributed import Failure, RankError, run_distributed
from tests.end_to_end.test_equal_to_stock import BUCKETS, UNTIED, Row
from tests.end_to_end.training import Record, differences, train

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(600)]

TIMEOUT_S = 60  # the least Megatron takes
PLAIN = f"--overlap-grad-reduce {BUCKETS}"
SHARE = f"--overlap-grad-reduce {UNTIED} --schedule aiao:step=next:share=0.5 --clip-grad 0"
PLACE = re.compile(r"^fold3d: rank \d \(pipeline rank \d\) was at (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Job:
    """Rank 1, which is in a pipeline with rank 3 and replicates rank 0, meets ``fault``.

    Attributes:
        flags: how gradients are reduced.
        fault: a signal; ``leave``; or for how many seconds its cable is cut.
    """

    flags: str
    fault: signal.Signals | str | float

    @property
    def argv(self) -> tuple[str, ...]:
        row = Row(segments=2, dp=2, flags=f"--distributed-timeout-minutes 1 {self.flags}")
        return row.command("--schedule aiao")


@dataclass(slots=True)
class Outcome:
    """How a job ended: with records, or with failures at some time after the fault."""

    records: Sequence[Record] = ()
    failures: Sequence[Failure] = ()
    fault_s: float = math.nan

    def after_s(self) -> dict[int, float]:
        return {f.rank: f.when - self.fault_s for f in self.failures if f.when}

    def first(self) -> Failure:
        """What the first of the others says, to whom rank 1 has happened."""
        return min((f for f in self.failures if f.rank != 1), key=lambda failure: failure.when)


SILENT = Job(PLAIN, math.inf)
STALLED = Job(SHARE, 10.0)
JOBS = (
    SILENT,  # first: it takes longest
    STALLED,
    Job(PLAIN, signal.SIGKILL),
    Job(SHARE, signal.SIGKILL),
    Job(SHARE, "leave"),
)
ENDED = [job for job in JOBS if job != STALLED]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Mapping[Job, Outcome]:
    try:
        with Testbed(1, Link()):
            pass
    except TestbedError as error:
        pytest.skip(str(error))
    with ThreadPoolExecutor(len(JOBS)) as pool:
        folders = (tmp_path_factory.mktemp("job") for _ in JOBS)
        return dict(zip(JOBS, pool.map(_run, JOBS, folders), strict=True))


@pytest.mark.parametrize("job", ENDED, ids=str)
def test_every_rank_ends_within_the_timeout(job: Job, outcomes: Mapping[Job, Outcome]) -> None:
    outcome = outcomes[job]
    assert {failure.rank for failure in outcome.failures} == {0, 1, 2, 3}
    limit_s = TIMEOUT_S + 15 if job is SILENT else 15
    assert max(outcome.after_s().values()) < limit_s, outcome.after_s()


@pytest.mark.parametrize("job", ENDED, ids=str)
def test_the_first_error_names_the_action(job: Job, outcomes: Mapping[Job, Outcome]) -> None:
    assert PLACE.search(outcomes[job].first().text), outcomes[job].first().text


def test_a_stall_shorter_than_the_timeout_loses_nothing(
    outcomes: Mapping[Job, Outcome],
) -> None:
    undisturbed = run_distributed(train, 4, STALLED.argv)
    assert differences(outcomes[STALLED].records, undisturbed) == []


def _run(job: Job, folder: Path) -> Outcome:
    with Testbed(4, Link()) as bed:
        namespaces = [bed.namespace(host) for host in range(4)]
        place = (namespaces, bed.address(0), folder)
        with ThreadPoolExecutor(1) as pool:
            cable = pool.submit(_cut, bed, job.fault, folder)
            try:
                records = run_distributed(
                    _train_with_fault,
                    *(4, place, job.fault, job.argv),
                    timeout_s=400,
                    grace_s=TIMEOUT_S + 15,
                )
                outcome = Outcome(records=records)
            except RankError as error:
                outcome = Outcome(failures=error.failures)
            (folder / "over").touch()
            cable.result()
        outcome.fault_s = float((folder / "fault").read_text())
        return outcome


def _cut(bed: Testbed, fault: signal.Signals | str | float, folder: Path) -> None:
    """Cut the cable of rank 1 when it asks for it, for as long as the job says."""
    while not (folder / "fault").exists() and not (folder / "over").exists():
        time.sleep(0.02)
    if isinstance(fault, float):
        with bed.cut(1):
            (folder / "cut").touch()
            end_s = time.monotonic() + fault
            while time.monotonic() < end_s and not (folder / "over").exists():
                time.sleep(0.02)


def _train_with_fault(
    place: tuple[Sequence[str], str, Path],
    fault: signal.Signals | str | float,
    argv: Sequence[str],
) -> Record:
    """Train on the rank's host; rank 1 meets its fault in the second iteration, in mid-sync."""
    from megatron.fold3d.runtime.grad_sync.dp_sync import DPSync

    namespaces, address, folder = place
    rank = int(os.environ["RANK"])
    with Path(namespaces[rank]).open() as namespace:
        os.setns(namespace.fileno(), os.CLONE_NEWNET)
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    complete, count = DPSync.complete, 0

    def complete_and_meet_fault(self: Any, segment: int) -> None:
        nonlocal count
        complete(self, segment)
        count += 1
        if count == 3:
            (folder / "fault.new").write_text(str(time.monotonic()))
            (folder / "fault.new").rename(folder / "fault")
            if isinstance(fault, signal.Signals):
                os.kill(os.getpid(), fault)
            elif fault == "leave":
                sys.exit(0)
            while not (folder / "cut").exists():
                time.sleep(0.01)

    if rank == 1:
        DPSync.complete = complete_and_meet_fault  # type: ignore[method-assign]
    return train(argv)
