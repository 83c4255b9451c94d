"""What runs on a GPU, run on CPU tensors by a device that is as late as a GPU may be."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer

from megatron.fold3d.runtime.feature import Iteration
from megatron.fold3d.runtime.grad_sync.bucket_groups import bucket_groups
from megatron.fold3d.runtime.grad_sync.dp_sync import DPSync
from megatron.fold3d.runtime.preemption.communicator import extension
from tests.distributed import run_distributed
from tests.end_to_end.training import Record, differences
from tests.gpu_path.cases import CASES, UNTIED, ZERO, Case, found_by, stock_of, wrong
from tests.gpu_path.late_training import Late, train_late
from tests.gpu_path.mutations import MUTATIONS, Mutation, mutate
from tests.gpu_path.small_programs import fill_a_queue

pytestmark = pytest.mark.gloo

ROOT = Path(__file__).parents[2]
ONE_QUEUE, MANY = 1, 64


# The other pairs: tests/stress/gpu_path.py.
@pytest.mark.parametrize(
    ("case", "num_queues"),
    [
        (CASES[0], ONE_QUEUE),
        (CASES[1], ONE_QUEUE),
        (CASES[2], MANY),
        (CASES[6], MANY),
        (CASES[7], ONE_QUEUE),
        (CASES[10], ONE_QUEUE),
        (CASES[19], ONE_QUEUE),
        (CASES[-1], ONE_QUEUE),
    ],
    ids=str,
)
def test_late_streams_train_what_stock_trains(case: Case, num_queues: int, tmp_path: Path) -> None:
    assert wrong(case, Late(num_queues=num_queues), tmp_path) == []


LATE_COLLECTIVES = (5, 9, 13, 17, -1)


@pytest.mark.parametrize("case", [CASES[number] for number in LATE_COLLECTIVES], ids=str)
def test_late_collectives_train_what_stock_trains(case: Case, tmp_path: Path) -> None:
    assert wrong(case, Late(num_queues=MANY, keeps_tensors=True), tmp_path) == []


@pytest.mark.parametrize(
    ("flags", "ours"),
    [(ZERO, "--schedule aiao"), ("--overlap-grad-reduce", "--schedule aiao:slices=on")],
    ids=("distributed optimizer", "slices"),
)
def test_with_one_queue_odd_segments_are_reduced_in_another_group(flags: str, ours: str) -> None:
    case = Case("in turns", flags=f"{flags} {UNTIED}", dp=2)
    found = run_distributed(_train_with_one_queue, case.num_ranks, case.command(ours))
    assert differences([record for record, _ in found], stock_of(case)) == []
    for _, used in found:
        (even,), (odd,) = used["reduce", 0], used["reduce", 1]
        assert even != odd
        if flags == ZERO:
            assert used["gather", 0] == used["gather", 1] == {even}


def _train_with_one_queue(argv: Sequence[str]) -> tuple[Record, dict[tuple[str, int], set[int]]]:
    """Train; also return the groups of reductions and all-gathers of even and odd segments."""
    used: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    buckets: list[tuple[int, int, int]] = []  # whether its segment is odd, its begin, its end
    prepare = DPSync.prepare

    def prepare_and_look(self: DPSync, iteration: Iteration) -> None:
        prepare(self, iteration)
        buckets[:] = [
            (segment % 2, memory.data_ptr(), memory.data_ptr() + memory.nbytes)
            for segment, chunk in enumerate(iteration.chunks)
            for bucket_group in bucket_groups(chunk)
            for bucket in bucket_group.buckets
            for memory in (bucket.grad_data, bucket.param_data)
            if memory is not None
        ]

    def noting(kind: str, start: Callable[..., Any]) -> Callable[..., Any]:
        def note(target: torch.Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
            for is_odd, begin, end in buckets:
                if begin <= target.data_ptr() < end:
                    used[kind, is_odd].add(id(group))
            return start(target, *args, group=group, **kwargs)

        return note

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DPSync, "prepare", prepare_and_look)
        for kind, function, megatrons in (
            ("reduce", "all_reduce", None),
            ("reduce", "reduce_scatter_tensor", "dist_reduce_scatter_func"),
            ("gather", "all_gather_into_tensor", "dist_all_gather_func"),
        ):
            spy = noting(kind, getattr(dist, function))
            patch.setattr(dist, function, spy)
            if megatrons is not None:  # Megatron looked it up when it was imported
                patch.setattr(param_and_grad_buffer, megatrons, spy)
        return train_late(argv, Late(num_queues=ONE_QUEUE)), dict(used)


@pytest.mark.skipif(extension() is None, reason="the C++ scheduler is not built")
def test_with_preemption_the_host_fills_no_queue_behind_a_receive() -> None:
    assert fill_a_queue(None) == []


@pytest.mark.parametrize("mutation", [MUTATIONS[number] for number in (0, 9, 15)], ids=str)
def test_a_fault_of_synchronization_shows(mutation: Mutation, tmp_path: Path) -> None:
    # All of them take minutes: tests/stress/gpu_path.py.
    assert found_by(mutation, tmp_path)


def test_every_fault_is_a_change_of_todays_source() -> None:
    assert len(MUTATIONS) >= 20
    for mutation in MUTATIONS:
        if mutation.is_cpp:
            mutation.change((ROOT / mutation.place).read_text())
            continue
        with mutate(mutation):
            pass
