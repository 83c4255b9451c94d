"""DP.sync in slices: each of a stage's gradients once, and one collective per computation."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.fold3d.plan.compile import Options, lower
from megatron.fold3d.plan.ir import Action, Op, Plan, PlanError
from megatron.fold3d.plan.ops import COMPUTE_OPS
from megatron.fold3d.plan.passes.grad_sync import slices_of
from megatron.fold3d.plan.passes.sliced_grad_sync import MOST_SLICES, slice_grad_sync
from megatron.fold3d.plan.passes.weight_grads import split_stages
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.plan.verify import verify
from tests.plan.test_properties import Case, cases

REDUCES = (Op.REDUCE_SLICE, Op.REDUCE_GRAD)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, Plan]:
    """A plan with DP.sync, and the same plan with it in slices."""
    order = draw(cases().map(Case.build))
    split = order.has(Op.WEIGHT)
    whole = lower(
        order,
        Options(
            delay_weight_grads=() if split else draw(st.sampled_from(((), (0,)))),
            receives_late=draw(st.booleans()),
            deferred_stages=range(draw(st.sampled_from((0, order.num_ranks, 100)))),
        ),
    )
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
    others = frozenset(Op) - {*REDUCES}
    assert sliced.select(others) == whole.select(others)


@pytest.mark.slow
@given(plans())
def test_the_slices_of_a_stage_follow_its_gradients_and_precede_their_wait(
    both: tuple[Plan, Plan],
):
    _, plan = both
    for program in plan.programs:
        split = split_stages(program)
        for stage, slices in slices_of(program).items():
            ends = [action.microbatch for action in slices]
            assert ends.pop() is None
            assert all(a < b for a, b in pairwise((0, *ends, 1000)) if a is not None)
            gradient = Op.WEIGHT if stage in split else Op.BACKWARD
            last = max(i for i, a in enumerate(program) if a[:2] == (stage, gradient))
            wait = program.index(Action(stage, Op.WAIT_GRAD))
            turn = [(program.index(a) - last) % len(program) for a in slices]
            assert turn == sorted(turn)  # from the last gradient on, around the iteration
            assert turn[-1] < (wait - last) % len(program)


@given(plans())
def test_at_most_one_slice_stands_between_two_computations(both: tuple[Plan, Plan]):
    _, plan = both
    for program in plan.programs:
        since: list[Action] = []
        last = max(i for i, action in enumerate(program) if action.op in COMPUTE_OPS)
        for action in program[:last]:
            if action.op in COMPUTE_OPS:
                since = []
            elif action.op in REDUCES:
                since.append(action)
                assert len(since) == 1


def test_a_stage_of_many_microbatches_has_a_limited_number_of_slices():
    order = build("aiao", num_ranks=1, num_segments=2, num_microbatches=450)
    plan = lower(order, Options(slice_shares=(1.0, 1.0)))
    slices = slices_of(plan.programs[0])[1]
    assert MOST_SLICES / 2 < len(slices) <= MOST_SLICES


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "0F0 0B0 0REDUCE_GRAD.500 0REDUCE_GRAD.250 0REDUCE_GRAD 0WAIT_GRAD",
            "0REDUCE_GRAD.250 comes after 0REDUCE_GRAD.500; a slice begins where the last one ends",
        ),
        (
            "0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD.250 0WAIT_GRAD",
            "0REDUCE_GRAD.250 comes after 0REDUCE_GRAD, which starts all that is left",
        ),
        (
            "0F0 0B0 0REDUCE_GRAD.250 0REDUCE_GRAD.250 0REDUCE_GRAD 0WAIT_GRAD",
            "0REDUCE_GRAD.250 appears more than once",
        ),
        (
            "0F0 0F1 0B0 0REDUCE_GRAD.250 0B1 0REDUCE_GRAD 0WAIT_GRAD",
            "deadlock: rank 0 waits at 0REDUCE_GRAD.250 for 0B1",
        ),
        (
            "0F0 0B0 0REDUCE_GRAD.250 0WAIT_GRAD",
            "0REDUCE_GRAD is missing; what starts must be waited for",
        ),
        (
            "0F0 0B0 0REDUCE_GRAD.000 0REDUCE_GRAD 0WAIT_GRAD",
            "0REDUCE_GRAD.000 is empty; a slice ends behind where it begins",
        ),
        (
            "0REDUCE_GRAD 0WAIT_GRAD 0F0 0B0 0REDUCE_GRAD.250 0REDUCE_GRAD.100",
            "0REDUCE_GRAD.100 comes after 0REDUCE_GRAD.250; a slice begins where the last one ends",
        ),
        (
            "0REDUCE_GRAD.250 0F0 0WAIT_GRAD 0B0 0REDUCE_GRAD",
            "deadlock: rank 0 waits at 0REDUCE_GRAD.250 for 0B0",
        ),
    ],
)
def test_slices_run_in_order_once_and_between_gradient_and_wait(text: str, message: str):
    with pytest.raises(PlanError) as refused:
        verify(Plan.from_text(text))
    assert str(refused.value).splitlines()[0] == message


@pytest.mark.parametrize("word", ["0REDUCE_GRAD.", "0REDUCE_GRAD.25", "0REDUCE_GRAD.1000"])
def test_a_slice_ends_with_three_digits(word: str):
    with pytest.raises(PlanError, match=r"a slice of DP.sync ends with three digits"):
        Action.from_str(word)
