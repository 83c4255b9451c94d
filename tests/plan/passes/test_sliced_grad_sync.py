"""DP.sync in slices: each of a stage's gradients once, and one collective per computation."""

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.ir import Action, Op, Plan, PlanError, Program
from megatron.fold3d.plan.ops import COMPUTE_OPS, SUM_OPS
from megatron.fold3d.plan.parts import part_begins
from megatron.fold3d.plan.passes.sliced_grad_sync import MOST_SLICES, slice_grad_sync
from megatron.fold3d.plan.passes.weight_grads import split_stages
from megatron.fold3d.plan.verify import verify
from tests.plan.test_properties import Case, cases
from tests.plans import built, planned


def slices_of(program: Program) -> dict[int, list[Action]]:
    """The slices of each stage, in the order of its loop."""
    found: dict[int, list[Action]] = defaultdict(list)
    for action in part_begins(program):
        if action.op in SUM_OPS:
            found[action.stage].append(action)
    return found


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, Plan]:
    """A plan with DP.sync, and the same plan with it in slices."""
    order = draw(cases().map(Case.build))
    choice = Choice.plain("plan", order.num_segments)
    if not order.has(Op.WEIGHT):
        choice = choice.changed(draw(st.sampled_from(((), (0,)))), wgrad="last")
    choice = choice.changed(draw(st.sampled_from(((), (0,), None))), step="next")
    whole = planned(order, choice, receives_late=draw(st.booleans()))
    stages = order.num_stages
    shares = draw(st.lists(st.floats(0, 1), min_size=stages, max_size=stages))
    return whole, slice_grad_sync(whole, shares)


@pytest.mark.slow
@given(plans())
def test_slices_replace_dp_sync_and_leave_the_rest_alone(both: tuple[Plan, Plan]):
    whole, sliced = both
    verify(sliced)
    assert Plan.from_text(sliced.to_text()) == sliced
    assert (sliced.num_segments, sliced.num_microbatches) == (
        whole.num_segments,
        whole.num_microbatches,
    )
    others = frozenset(Op) - SUM_OPS
    assert sliced.select(others) == whole.select(others)


@pytest.mark.slow
@given(plans())
def test_the_slices_of_a_stage_follow_its_gradients_and_precede_their_step(both):
    _, plan = both
    for program in plan.programs:
        split = split_stages(program)
        for stage, slices in slices_of(program).items():
            ends = [action.end for action in slices]
            assert ends[-1] == 1000
            assert all(a < b for a, b in pairwise((0, *ends)))
            gradient = Op.WEIGHT if stage in split else Op.BACKWARD
            last = max(i for i, a in enumerate(program) if a[:2] == (stage, gradient))
            step = program.index(Action(stage, Op.STEP))
            turn = [(program.index(a) - last) % len(program) for a in slices]
            assert turn == sorted(turn)  # from the last gradient on, around the iteration
            assert turn[-1] < (step - last) % len(program)


@given(plans())
def test_at_most_one_slice_stands_between_two_computations(both: tuple[Plan, Plan]):
    _, plan = both
    for program in plan.programs:
        since: list[Action] = []
        last = max(i for i, action in enumerate(program) if action.op in COMPUTE_OPS)
        for action in program[:last]:
            if action.op in COMPUTE_OPS:
                since = []
            elif action.op in SUM_OPS:
                since.append(action)
                assert len(since) == 1


def test_a_stage_of_many_microbatches_has_a_limited_number_of_slices():
    order = built("aiao", 1, 2, 450)
    plan = planned(order, "slices=on")
    slices = slices_of(plan.programs[0])[1]
    assert MOST_SLICES / 2 < len(slices) <= MOST_SLICES


@pytest.mark.parametrize(
    "word", ["0ALL_REDUCE:", "0ALL_REDUCE:0", "0ALL_REDUCE:025", "0ALL_REDUCE:1001", "0STEP:250"]
)
def test_a_part_ends_with_thousandths(word: str):
    with pytest.raises(PlanError, match=r"a part of DP.sync ends with thousandths"):
        Action.from_str(word)


def test_a_part_that_ends_with_all_is_all_that_is_left():
    assert Action.from_str("0ALL_REDUCE:1000") == Action.from_str("0ALL_REDUCE")
