"""A sample of the plans that `tests.stress.one_queue` plays; it plays all of them."""

import time
from itertools import islice

import pytest

from megatron.fold3d.plan.schedules import SCHEDULES
from tests.stress.one_queue import EXTRAS, cases, rejected, until

EVERY = 997  # a prime, so that the sample has every extra


@pytest.mark.slow
def test_plans_end_with_one_hardware_queue() -> None:
    played = list(rejected(islice(cases(), 0, None, EVERY)))
    assert [(case, why) for case, why in played if why is not None] == []
    assert {case.schedule for case, _ in played} == set(SCHEDULES)
    assert {case.extra for case, _ in played} == set(EXTRAS)


def test_when_the_time_is_up_no_further_plan_is_played() -> None:
    some = list(islice(cases(), 3))
    assert list(until(time.monotonic(), some)) == some[:1]
    assert list(until(time.monotonic() + 60, some)) == some
