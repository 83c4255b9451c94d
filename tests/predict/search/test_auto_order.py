"""The order that a run chooses for its own times."""

from dataclasses import replace
from functools import partial

import pytest

from megatron.fold3d.plan.compile import lower
from megatron.fold3d.plan.ir import Op, PlanError
from megatron.fold3d.plan.passes.place_weight_grads import HeldSizes
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.plan.verify import verify
from megatron.fold3d.policy.measured_times import MeasuredTimes
from megatron.fold3d.predict.search.auto_order import AutoOrder

FOUR = (1.0,) * 4
TIMES = MeasuredTimes(
    forward_s=FOUR,
    backward_s=FOUR,
    recompute_s=(0.0,) * 4,
    weight_s=FOUR,
    transfer_s=0.5,
    grad_sync_s=(0.0,) * 4,
)
SIZES = {"num_ranks": 4, "num_segments": 1, "num_microbatches": 8}


def one_f_one_b(ahead: int | None):
    return build("1f1b", **SIZES, forwards_ahead=ahead)


BOTH = AutoOrder(auto_ahead=True, auto_weight_grads=True)


def test_until_times_are_known_they_count_as_equal():
    assert BOTH.before_measuring(one_f_one_b) == build("zb-h1", **SIZES)
    assert AutoOrder(auto_ahead=True).before_measuring(one_f_one_b) == one_f_one_b(None)


def test_slow_transfers_let_more_forwards_run_ahead():
    chosen = {
        transfer_s: BOTH.choose(replace(TIMES, transfer_s=transfer_s), one_f_one_b)
        for transfer_s in (0.0, 0.5)
    }
    assert [(c.forwards_ahead, c.splits) for c in chosen.values()] == [(1, True), (2, True)]
    assert chosen[0.5].seconds == 3 * 1.5 + 8 * 3  # its lower bound


def test_no_more_forwards_run_ahead_than_memory_has_room_for():
    held = HeldSizes(saved=FOUR, delayed=FOUR, most=(4.0,) * 4)
    assert BOTH.choose(replace(TIMES, held=held), one_f_one_b).forwards_ahead == 1
    roomy = replace(held, most=(7.0,) * 4)
    assert BOTH.choose(replace(TIMES, held=roomy), one_f_one_b).forwards_ahead == 2


def test_weight_gradients_that_memory_has_no_room_for_stay_in_their_backwards():
    heavy = HeldSizes(saved=FOUR, delayed=(8.0,) * 4, most=(4.0,) * 4)  # recomputation
    choice = AutoOrder(auto_weight_grads=True).choose(replace(TIMES, held=heavy), one_f_one_b)
    assert not choice.splits
    assert not choice.plan.has(Op.WEIGHT)


def test_a_limit_that_the_order_cannot_keep_is_refused_with_the_plan():
    few = AutoOrder(auto_weight_grads=True, most_activations=3)
    with pytest.raises(PlanError, match="0F3 and may hold 3: raise the limit") as error:
        few.before_measuring(one_f_one_b)
    assert ">0F3<" in str(error.value)


def test_dp_sync_of_the_first_segment_is_hidden_behind_weight_gradients():
    aiao = partial(build, "aiao", num_ranks=2, num_segments=2, num_microbatches=4)
    times = replace(TIMES, transfer_s=0.0, grad_sync_s=(6.0,) * 4)
    roomy = AutoOrder(auto_weight_grads=True, most_activations=8, defers=True)
    choice = roomy.choose(times, lambda ahead: aiao(forwards_ahead=ahead))
    whole = AutoOrder(defers=True).choose(times, lambda ahead: aiao(forwards_ahead=ahead))
    assert choice.splits
    assert choice.seconds < whole.seconds
    verify(lower(choice.plan))


@pytest.mark.parametrize("defers", [False, True])
def test_what_is_told_names_the_choice(defers: bool):
    told: list[str] = []
    auto = replace(BOTH, defers=defers)
    plan = auto.arranged(TIMES, told.append)(one_f_one_b)
    verify(lower(plan))
    assert "8 micro-batches, ahead=" in told[0]
    assert ", weight gradients in the gaps; predicted " in told[0]
    assert str(TIMES) == "F 1e+03 ms, B 1e+03 ms, W 1e+03 ms, transfer 500 ms"
