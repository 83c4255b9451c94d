"""Some cases of the sweep; `make stress` draws from all faults, actions and features."""

import os

import pytest

from tests.stress.faults import FAULTS, FEATURES, Case, draw, needs_root, problems

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


def test_every_fault_is_drawn_that_waits_for_no_timeout() -> None:
    drawn = [draw(f"{number}") for number in range(2000)]
    assert {case.fault for case in drawn} == {
        name for name, fault in FAULTS.items() if not fault.waits
    }
    assert {case.features for case in drawn} == set(FEATURES)
    assert {case.rank for case in drawn if case.fault == "SIGKILL"} == {0, 1, 2, 3}
