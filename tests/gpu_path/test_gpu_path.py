"""What runs on a GPU, run on CPU tensors by a device that is as late as a GPU may be."""

from pathlib import Path

import pytest

from tests.gpu_path.cases import CASES, Case, found_by, wrong
from tests.gpu_path.late_training import Late
from tests.gpu_path.mutations import MUTATIONS, Mutation, mutate

pytestmark = pytest.mark.gloo

ONE_QUEUE, MANY = 1, 64


# The others of these six pairs: tests/stress/gpu_path.py.
@pytest.mark.parametrize(
    ("case", "num_queues"),
    [(CASES[0], ONE_QUEUE), (CASES[1], ONE_QUEUE), (CASES[1], MANY), (CASES[2], MANY)],
    ids=str,
)
def test_late_streams_train_what_stock_trains(case: Case, num_queues: int, tmp_path: Path) -> None:
    assert wrong(case, Late(num_queues=num_queues), tmp_path) == []


@pytest.mark.parametrize("case", CASES[3:], ids=str)
def test_late_collectives_train_what_stock_trains(case: Case, tmp_path: Path) -> None:
    late = Late(num_queues=MANY, queues_operators=case.queues_operators)
    assert wrong(case, late, tmp_path) == []


@pytest.mark.parametrize("mutation", [MUTATIONS[number] for number in (0, 2, 9, -1)], ids=str)
def test_a_fault_of_synchronization_shows(mutation: Mutation, tmp_path: Path) -> None:
    # All of them take minutes: tests/stress/gpu_path.py.
    assert found_by(mutation, tmp_path)


def test_every_fault_is_a_change_of_todays_source() -> None:
    assert len(MUTATIONS) >= 20
    for mutation in MUTATIONS:
        with mutate(mutation):
            pass
