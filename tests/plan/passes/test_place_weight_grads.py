"""Weight gradients in the gaps of a plan: where they go, and how much they may hold."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.fold3d.plan.ir import Op, Plan, PlanError
from megatron.fold3d.plan.memory import HeldSizes, peak_activations
from megatron.fold3d.plan.passes.place_weight_grads import (
    StageTimes,
    place_weight_grads,
    placed_orders,
)
from megatron.fold3d.plan.passes.weight_grads import delay_weight_grads
from megatron.fold3d.plan.schedules import FORWARDS_AHEAD, ONE_SEGMENT_SCHEDULES
from megatron.fold3d.plan.verify import verify
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.simulate import simulate
from tests.plans import built, planned


def times(plan: Plan, f: float = 1, b: float = 1, w: float = 1, transfer_s: float = 0):
    n = plan.num_stages
    return StageTimes(
        forward_s=(f,) * n, backward_s=(b,) * n, weight_s=(w,) * n, transfer_s=transfer_s
    )


def seconds(plan: Plan, known: StageTimes) -> float:
    whole = tuple(b + w for b, w in zip(known.backward_s, known.weight_s, strict=True))
    costs = Costs(
        forward_s=known.forward_s, backward_s=whole, weight_s=known.weight_s, p2p_s=known.transfer_s
    )
    return simulate(plan, costs).period_s


def one_f_one_b(ranks: int, microbatches: int, ahead: int = 1) -> Plan:
    return built("1f1b", ranks, 1, microbatches, forwards_ahead=ahead)


@pytest.mark.parametrize("ranks", [1, 2, 4, 6])
@pytest.mark.parametrize("rounds", [2, 3])
def test_equal_times_make_1f1b_zero_bubble(ranks: int, rounds: int):
    order = one_f_one_b(ranks, ranks * rounds)
    assert place_weight_grads(order, times(order)) == built("zb-h1", ranks, 1, ranks * rounds)

    # The papers' ZB-H2 alternates B and W to the end; here B comes first, for which others wait.
    further, h2 = (
        one_f_one_b(ranks, ranks * rounds, ahead=2),
        built("zb-h2", ranks, 1, ranks * rounds),
    )
    placed = place_weight_grads(further, times(further))
    assert seconds(placed, times(order)) == seconds(h2, times(order))
    assert max(peak_activations(placed)) == max(peak_activations(h2))


def test_a_gap_is_filled_with_what_fits_it():
    order = Plan.from_text("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    # Rank 1 waits for 1F1 from 4 to 4.5 with w = 0.5, and rank 0 for 0B1.
    known = times(order, f=1, b=1, w=0.5, transfer_s=1.5)
    assert place_weight_grads(order, known).to_text() == (
        "0F0 0F1 0B0 0W0 0B1 0W1\n1F0 1B0 1F1 1B1 1W0 1W1\n"
    )
    long = times(order, f=1, b=1, w=4, transfer_s=1.5)
    assert place_weight_grads(order, long).to_text().startswith("0F0 0F1 0B0 0B1 0W0")
    overrunning = place_weight_grads(order, long, overrun=1.0)
    assert overrunning.to_text().startswith("0F0 0F1 0B0 0W0 0B1")


def test_segments_at_the_end_are_those_that_delay_weight_grads_leaves_there():
    aiao = built("aiao", 2, 3, 4)
    roomy = HeldSizes.counted(aiao, most=100)
    placed = place_weight_grads(aiao, times(aiao, w=100), roomy, at_end=range(3))
    assert placed == delay_weight_grads(aiao, range(3))


def test_weight_gradients_that_hold_more_than_activations_wait_less():
    order = one_f_one_b(2, 6)  # with recomputation a backward keeps eight times what a forward does
    held = HeldSizes(saved=(1, 1), delayed=(8, 8), most=(10, 10))
    last = place_weight_grads(order, times(order), held).to_text().splitlines()[1]
    assert last.startswith("1F0 1B0 1F1 1W0 1B1 1F2 1W1 1B2")


def test_a_backward_leaves_what_its_weight_gradients_hold():
    held = HeldSizes(saved=(1,), delayed=(8,), most=(10,))
    assert held.peaks(Plan.from_text("0F0 0F1 0B0 0W0 0B1 0W1")) == [9]
    assert held.peaks(Plan.from_text("0F0 0F1 0B0 0B1 0W:500 0W:1000")) == [16]


@pytest.mark.parametrize(
    ("most", "marked"),
    [(2, "rank 0 would hold 3 with 0F2 and may hold 2"), (0, "would hold 1 with")],
)
def test_a_limit_below_what_the_order_holds_is_refused(most: int, marked: str):
    order = one_f_one_b(3, 4)
    with pytest.raises(PlanError, match=f"{marked}.*raise the limit, or run fewer forw") as error:
        place_weight_grads(order, times(order), HeldSizes.counted(order, most))
    assert ">0F" in str(error.value)


def test_an_order_that_cannot_run_is_refused():
    order = Plan.from_text("0B0 0F0\n1F0 1B0")
    with pytest.raises(PlanError, match="no rank can go on") as error:
        place_weight_grads(order, times(order))
    assert ">0B0<" in str(error.value)
    assert ">1F0<" in str(error.value)


@st.composite
def orders(draw: st.DrawFn) -> Plan:
    schedule = draw(st.sampled_from(("aiao", "afab", "1f1b", "interleaved", "breadth-first")))
    ahead = draw(st.integers(1, 4)) if schedule in FORWARDS_AHEAD else None
    segments = 1 if schedule in ONE_SEGMENT_SCHEDULES else draw(st.integers(1, 3))
    sizes = draw(st.integers(1, 4)), segments, draw(st.integers(1, 8))
    return built(schedule, *sizes, forwards_ahead=ahead)


@settings(max_examples=60, deadline=None)
@given(orders(), st.data())
def test_unlike_stages_keep_to_what_a_rank_may_hold(order: Plan, data: st.DataObject):
    each = st.lists(
        st.sampled_from((0.25, 1.0, 3.0)), min_size=order.num_stages, max_size=order.num_stages
    ).map(tuple)
    known = StageTimes(
        forward_s=data.draw(each),
        backward_s=data.draw(each),
        weight_s=data.draw(each),
        transfer_s=data.draw(st.sampled_from((0.0, 1.0))),
    )
    most = max(peak_activations(order)) + data.draw(st.integers(0, 3))
    held = HeldSizes.counted(order, most)
    placed = data.draw(st.sampled_from([*placed_orders(order, known, held)]))
    verify(planned(placed))
    assert placed.select({Op.FORWARD, Op.BACKWARD}) == order
    for program in placed.select({Op.WEIGHT}).programs:
        for stage in {action.stage for action in program}:
            assert [m for s, _, m in program if s == stage] == list(range(order.num_microbatches))
    assert max(peak_activations(placed)) <= most


@pytest.mark.parametrize(("f", "b", "w"), [(1, 1, 1), (1.0, 1.25, 0.75), (2, 2.5, 1.5)])
@pytest.mark.parametrize("ahead", [1, 2])
def test_the_bubble_is_the_papers(f: float, b: float, w: float, ahead: int):
    order = one_f_one_b(4, 8, ahead)
    known = times(order, f, b, w)
    placed = place_weight_grads(order, known)
    work = 8 * (f + b + w)
    # The first rank begins first; the paper counts a rank from its first computation to its last.
    assert seconds(placed, known) <= work + 3 * (f + b - w) + 1e-9
    if ahead == 1 and f == b == w:
        assert seconds(placed, known) == work + 3 * (f + b - w)
    assert seconds(order, known) == pytest.approx(work + 3 * (f + b + w))
