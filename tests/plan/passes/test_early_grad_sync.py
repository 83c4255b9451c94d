from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.ir import Op, Plan, PlanError
from megatron.fold3d.plan.ops import COMPUTE_OPS, WEIGHT_OPS
from megatron.fold3d.plan.passes.early_grad_sync import stages_in_parts
from megatron.fold3d.plan.passes.transfers import add_p2p
from megatron.fold3d.plan.verify import verify
from tests.plans import built, planned, verified

SPLIT = frozenset({Op.BACKWARD, Op.WEIGHT_PART})
EARLY = """
0F0 0F1 0B0 0B1 0W:500 0ALL_REDUCE:500 0W:1000 0ALL_REDUCE 0STEP
1F0 1F1 1B0 1B1 1ALL_REDUCE 1STEP
"""


def early(plan: Plan) -> set[int]:
    return set().union(*map(stages_in_parts, plan.programs))


@given(
    st.sampled_from(("aiao", "interleaved", "breadth-first")),
    st.integers(1, 4),
    st.integers(2, 4),
    st.integers(1, 9),
    st.sets(st.integers(0, 3)),
    st.booleans(),
)
def test_plans_with_early_slices_are_valid_and_differ_in_nothing_else(
    schedule: str, pp: int, segments: int, microbatches: int, delayed: set[int], gathers: bool
):
    delayed = {segment for segment in delayed if segment < segments}
    order = built(schedule, pp, segments, microbatches)
    choice = Choice.plain(schedule, segments).changed((0,), optimizer="replicated")
    choice = choice.changed(delayed, wgrad="last")
    if not gathers:
        choice = choice.changed(delayed, wgrad="behind")
    choice = choice.changed({0} & delayed, wgrad="behind")
    plan = verified(planned(order, choice, gathers_params=gathers, reduces_early=True))
    # With shards, segments are early if they are replicated, or behind all backwards.
    expected = {s * pp + r for s in delayed for r in range(pp)} if microbatches > 1 else set()
    assert early(plan) == expected
    for program in plan.programs:
        for stage in expected & {action.stage for action in program}:
            own = [i for i, a in enumerate(program) if a.stage == stage and a.op in SPLIT]
            between = {a.op for a in program[own[0] : own[-1]] if a.op in COMPUTE_OPS}
            parts = [a for a in program[own[0] :] if a.op is Op.WEIGHT_PART and a.stage == stage]
            assert between <= {Op.FORWARD, *SPLIT}  # of the last segment, forwards too
            assert [a.microbatch for a in parts] == [
                1000 * (m + 1) // microbatches for m in range(microbatches)
            ]
    late = planned(order, choice, gathers_params=gathers)
    kept = frozenset(Op) - WEIGHT_OPS - {Op.ALL_REDUCE, Op.STEP}
    assert plan.select(kept & COMPUTE_OPS) == late.select(kept & COMPUTE_OPS)


def test_what_is_computed_behind_all_backwards_reduces_to_shards_in_slices():
    order = built("aiao", 1, 4, 2)
    parts = "wgrad=behind@0:wgrad=last@1,2"
    made = partial(planned, order, reduces_early=True)
    whole = f"{parts}:optimizer=replicated@0"
    text = verified(made(whole, gathers_params=True)).to_text()
    assert text.endswith(
        "0B0 0B1 0W:500 0ALL_REDUCE:500 0W:1000 0ALL_REDUCE "
        "1W:500 1REDUCE_SCATTER:500 1W:1000 1REDUCE_SCATTER "
        "2W:500 2REDUCE_SCATTER:500 2W:1000 2REDUCE_SCATTER "
        "3STEP 0STEP 1STEP 2STEP\n"
    )
    late = made("wgrad=last@0-2:step=next", gathers_params=True)
    assert not early(verified(late))
    assert not early(verified(made("wgrad=last@0-2", shards="weights")))


def test_a_stage_that_is_carried_has_some_only_if_they_are_asked_for():
    order = built("aiao", 2, 2, 3)
    one = Choice.parse("aiao:wgrad=last@0:wgrad=behind@1", 2).changed((0,), step="next")
    assert early(verified(planned(order, one, reduces_early=True))) == {2, 3}
    plan = verified(planned(order, one.changed(step="next"), reduces_early=True))
    assert early(plan) == {2, 3}
    *_, last = plan.select(WEIGHT_OPS | {Op.ALL_REDUCE}).to_text().splitlines()
    assert last == (
        "3W:333 3ALL_REDUCE:333 3W:666 3ALL_REDUCE:666 3W:1000 3ALL_REDUCE 1W0 1W1 1W2 1ALL_REDUCE"
    )


def test_reductions_to_shards_start_early_where_it_is_asked_for():
    order = built("aiao", 2, 2, 3)
    made = partial(planned, order, gathers_params=True, reduces_early=True)
    assert early(verified(made("wgrad=last"))) == {0, 1, 2, 3}  # behind all backwards
    assert early(verified(made("wgrad=behind@1"))) == {2, 3}


def test_weight_gradients_between_backwards_stay_apart():
    order = built("zb-h1", 2, 1, 4)
    plan = verified(planned(order, reduces_early=True))
    assert not early(plan)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("0ALL_REDUCE:500", "0ALL_REDUCE:501", "0ALL_REDUCE:501 for 0W:1000"),
        ("0B1 0W:500", "0W:500 0B1", "rank 0 waits at 0W:500 for 0B1"),
        ("0W:1000", "0W:900", "0W:900 is the last part"),
        (
            "0W:500 0ALL_REDUCE:500 0W:1000",
            "0W:1000 0ALL_REDUCE:500 0W:500",
            "0W:500 comes after 0W:1000, which ends with all that is left",
        ),
        ("0W:500 0ALL_REDUCE:500", "0W:500 0ALL_REDUCE:500 0W:400", "0W:400 comes after 0W:500"),
        (  # as such plans were written before
            "0W:500 0ALL_REDUCE:500 0W:1000",
            "0W0 0ALL_REDUCE:500 0W1",
            "0ALL_REDUCE:500 comes before 0W1; write .* as 0W:500",
        ),
    ],
)
def test_a_slice_of_what_is_not_computed_is_refused(old: str, new: str, problem: str):
    verify(add_p2p(Plan.from_text(EARLY)))
    with pytest.raises(PlanError, match=problem):
        verify(add_p2p(Plan.from_text(EARLY.replace(old, new))))
