"""A seeded sample of the sweep; `make stress` draws from all faults, actions and features."""

import os

import pytest

from tests.stress.faults import FAULTS, FEATURES, draw, needs_root, problems

SEED = "h"
CASES = 1


@pytest.mark.gloo
@pytest.mark.parametrize("number", range(CASES))
def test_a_fault_loses_nothing_that_was_saved(number: int) -> None:
    case = draw(f"{SEED}/{number}")
    if needs_root(case.fault) and os.geteuid() != 0:
        pytest.skip(f"{case}: only root can make it")
    assert problems(case) == [], case


def test_every_fault_is_drawn_that_waits_for_no_timeout() -> None:
    drawn = [draw(f"{number}") for number in range(2000)]
    assert {case.fault for case in drawn} == {
        name for name, fault in FAULTS.items() if not fault.waits
    }
    assert {case.features for case in drawn} == set(FEATURES)
    assert {case.rank for case in drawn if case.fault == "SIGKILL"} == {0, 1, 2, 3}
