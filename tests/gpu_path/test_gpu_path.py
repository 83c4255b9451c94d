"""What runs on a GPU, run on CPU tensors by a device that is as late as a GPU may be."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.distributed import run_distributed
from tests.end_to_end.training import Record, differences, train
from tests.gpu_path.cases import CASES, LATER, UNTIED, Case, found_by, wrong
from tests.gpu_path.late_training import Late, train_late
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


def test_late_streams_sum_inside_nodes_as_prompt_threads_do() -> None:
    # Stock adds four replicas in another order, so that ours without delays is the reference.
    case = Case(
        name="nodes",
        ours="--schedule 1f1b --hierarchical-dp-sync auto --backward-share 0.5",
        flags=f"{LATER} {UNTIED}",
        pp=1,
        segments=1,
        dp=4,
        iterations=2,
    )
    prompt, late = (
        run_distributed(_train_on_two_nodes, 4, case.command(case.ours), delays)
        for delays in (None, Late(num_queues=MANY))
    )
    assert differences(late, prompt) == []


def _train_on_two_nodes(argv: Sequence[str], late: Late | None) -> Record:
    os.environ |= {"LOCAL_RANK": str(int(os.environ["RANK"]) % 2), "LOCAL_WORLD_SIZE": "2"}
    return train(argv) if late is None else train_late(argv, late)


@pytest.mark.parametrize("mutation", [MUTATIONS[number] for number in (0, 2, 9, -1)], ids=str)
def test_a_fault_of_synchronization_shows(mutation: Mutation, tmp_path: Path) -> None:
    # All of them take minutes: tests/stress/gpu_path.py.
    assert found_by(mutation, tmp_path)


def test_every_fault_is_a_change_of_todays_source() -> None:
    assert len(MUTATIONS) >= 20
    for mutation in MUTATIONS:
        with mutate(mutation):
            pass
