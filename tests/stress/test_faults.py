"""Some cases of the sweep; `make stress` draws from all faults, actions and features."""

import os

import pytest

from tests.stress.faults import Case, needs_root, problems

CASES = (
    Case("pairs", "SIGKILL", 1, 0.3, "patient"),
    Case("offloaded", "SIGKILL", 1, 0.6, "patient"),
    Case("shards", "SIGKILL", 1, 0.5, "patient"),
    Case("preemptive", "leaves", 1, 0.7, "patient"),
    Case("replicas", "out of memory", 1, 0.6, "torchrun"),
    Case("replicas", "cut link", 1, 0.7, "patient"),
    Case("replicas", "stalled link", 1, 0.7, "patient"),
    Case("delayed", "killed within a save", 0, 0.0, "torchrun"),
)


@pytest.mark.gloo
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_fault_loses_nothing_that_was_saved(case: Case) -> None:
    if needs_root(case.fault) and os.geteuid() != 0:
        pytest.skip("only root can make it")
    assert problems(case) == []
