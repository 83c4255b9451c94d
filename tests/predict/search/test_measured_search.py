"""The search of a run, from the times that it has measured."""

from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import pytest

from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.compile import Job, lower
from megatron.fold3d.plan.ir import Op
from megatron.fold3d.plan.memory import HeldSizes
from megatron.fold3d.plan.passes.place_weight_grads import place_with_equal_times
from megatron.fold3d.plan.verify import verify
from megatron.fold3d.policy.measured_times import MeasuredTimes
from megatron.fold3d.policy.predicted import Predicted
from megatron.fold3d.predict.search.measured_search import measured_search, predictions
from tests.plans import built


def alike(stages: int, backward: float, weight: float, sync: float, **fields: Any) -> MeasuredTimes:
    """Times of stages that are alike, with forwards of one second."""
    return MeasuredTimes(
        forward_s=(1.0,) * stages,
        backward_s=(backward,) * stages,
        recompute_s=(0.0,) * stages,
        weight_s=(weight,) * stages,
        grad_sync_s=(sync,) * stages,
        **fields,
    )


FOUR = (1.0,) * 4
TIMES = alike(4, 1.0, 1.0, 0.0, transfer_s=0.5)
GAPS = {"wgrad": ("backward", "gaps")}


def best(times: MeasuredTimes, word: str = "1f1b:wgrad=gaps", **changed: Any) -> Predicted:
    """What is predicted to be the fastest of four ranks and eight micro-batches."""
    job = Job(choice=Choice.parse(word, 1), num_ranks=4, num_microbatches=8)
    return measured_search(times, job, **{"free": GAPS, "frees_ahead": True} | changed).best


def test_until_times_are_known_they_count_as_equal():
    order = built("1f1b", 4, 1, 8)
    assert place_with_equal_times(order) == built("zb-h1", 4, 1, 8)


def test_slow_transfers_let_more_forwards_run_ahead():
    at_once = best(replace(TIMES, transfer_s=0.0))
    assert str(at_once.choice) == "1f1b:wgrad=gaps"
    slow = best(TIMES)
    assert str(slow.choice) == "1f1b:wgrad=gaps:ahead=2"
    assert slow.seconds == 3 * 1.5 + 8 * 3  # its lower bound
    verify(lower(slow.job))


def test_no_more_forwards_run_ahead_than_memory_has_room_for():
    held = HeldSizes(saved=FOUR, delayed=FOUR, most=(4.0,) * 4)
    assert best(replace(TIMES, held=held)).choice.ahead is None
    roomy = replace(held, most=(7.0,) * 4)
    assert best(replace(TIMES, held=roomy)).choice.ahead == 2


def test_weight_gradients_that_memory_has_no_room_for_stay_in_their_backwards():
    heavy = HeldSizes(saved=FOUR, delayed=(8.0,) * 4, most=(4.0,) * 4)  # recomputation
    assert not best(replace(TIMES, held=heavy)).choice.splits


def test_times_are_told_in_a_line():
    assert str(TIMES) == "F 1e+03 ms, B 1e+03 ms, W 1e+03 ms, transfer 500 ms"


def test_dp_sync_of_the_first_segment_is_hidden_behind_weight_gradients():
    times = replace(TIMES, transfer_s=0.0, grad_sync_s=(6.0,) * 4)
    first = Choice.parse("aiao:step=next:wgrad=gaps:held=8", 2)
    found = measured_search(times, Job(choice=first, num_ranks=2, num_microbatches=4), free=GAPS)
    assert found.best.choice.fills_gaps
    assert found.price(found.best.choice) < found.price(first.changed(wgrad="backward"))


def test_segments_are_replicated_as_far_as_memory_has_room():
    eight = (3.0,) * 8
    times = alike(8, 2.0, 0.0, 12.0, transfer_s=0.1, other_shard_bytes=(5.0,) * 4)
    first = Choice.plain("interleaved", 4)
    search = partial(
        measured_search,
        job=Job(
            choice=first, num_ranks=2, num_microbatches=4, steps_shards=True, gathers_params=True
        ),
        free={"optimizer": ("sharded", "replicated")},
        frees_order=True,
    )

    def replicated(room: float, held: HeldSizes | None = None) -> int:
        found = search(replace(times, held=held, room_bytes=room)).to_try()
        return max((len(one.choice.where(optimizer="replicated")) for one in found), default=0)

    assert replicated(room=4.0) == 0
    assert 1 <= replicated(room=5.0) <= replicated(room=100.0)
    assert replicated(room=5.0) == 1
    held = HeldSizes(saved=eight, delayed=eight, most=(60.0, 60.0))  # aiao holds 48
    assert replicated(room=100.0, held=held) <= 2


def test_measured_all_reduces_are_halved_and_gathers_have_the_size_of_parameters():
    # Of one rank, three segments and two micro-batches: forwards take 2 s each, backwards 6.
    times = alike(3, 3.0, 0.0, 6.0, transfer_s=0.0, other_shard_bytes=(0.0,) * 3)
    first = Choice.plain("afab", 3)
    order = built("afab", 1, 3, 2)
    job = Job.of(order, first, steps_shards=True, gathers_params=True)
    measured = partial(measured_search, free={"optimizer": ("sharded", "replicated")})
    (found,) = measured(times, job=job).to_try()
    assert (found.job.order, str(found.choice)) == (order, "afab:optimizer=replicated@1")
    assert found.seconds == 30.0
    # Gathers of parameters in 16 bits take 1.5 s each: only the first one is exposed.
    assert measured(times, job=replace(job, parameter_share=0.5)).first.seconds == pytest.approx(
        1.5 + 6 + 18 + 3
    )
    full = replace(times, room_bytes=1.0, other_shard_bytes=(2.0,) * 3)
    assert measured(full, job=job).to_try() == []


def test_a_first_choice_that_has_no_room_fills_no_gaps():
    job = Job(choice=Choice.parse("1f1b:wgrad=gaps", 1), num_ranks=4, num_microbatches=8)
    heavy = HeldSizes(saved=FOUR, delayed=(8.0,) * 4, most=(0.5,) * 4)
    times = replace(TIMES, held=heavy)
    assert place_with_equal_times(job.computed).has(Op.WEIGHT)
    found = predictions(times=times, job=job, free={})
    (kept,) = found.choices
    assert kept.seconds == inf
    assert not kept.job.computed.has(Op.WEIGHT)
