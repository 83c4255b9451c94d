"""Recomputation as an action of its own, in a plan."""

from megatron.fold3d.plan.ir import Op, Plan
from megatron.fold3d.plan.memory import peak_activations, peak_recomputed
from megatron.fold3d.plan.passes.offload import OffloadChoice, add_offload
from megatron.fold3d.plan.passes.pairs import chains
from megatron.fold3d.plan.passes.recompute import recompute_early
from megatron.fold3d.plan.verify import verify
from tests.plans import built, planned, verified

ORDER = built("1f1b", 2, 1, 3)


def test_it_stands_before_the_backward_and_its_receive_is_posted_before_it():
    plan = verified(planned(recompute_early(ORDER, [0])))
    assert plan.to_text().splitlines() == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0R0 0B0 0RECV_B1 0F2 0SEND_F2 0R1 0RECV_B2 0B1 0R2 0B2 "
        "0ALL_REDUCE 0STEP",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 1B2 1SEND_B2 "
        "1ALL_REDUCE 1STEP",
    ]


def test_both_of_a_pair_are_recomputed_before_their_backwards():
    plan = Plan.from_text("0F0 0F1 0F2 0B0 0B1 0B2")
    assert recompute_early(plan, [0], in_pairs=True).to_text() == (
        "0F0 0F1 0F2 0R0 0R1 0B0 0B1 0R2 0B2\n"
    )
    (program,) = recompute_early(plan, [0], in_pairs=True).programs
    assert [" ".join(map(str, chain)) for chain in chains(program)] == [
        "0F0 0F1 0F2",
        "0R0 0R1",
        "0B0 0B1",
    ]


def test_what_is_recomputed_already_stays_as_it_is():
    plan = Plan.from_text("0F0 0F1 0R1 0B0 0B1")
    assert recompute_early(plan, [0]).to_text() == "0F0 0F1 0R1 0R0 0B0 0B1\n"
    assert recompute_early(plan, []) == plan


def test_what_is_offloaded_comes_back_for_its_recomputation():
    order = recompute_early(Plan.from_text("0F0 0F1 0F2 0B0 0B1 0B2"), [0])
    plan = add_offload(order)
    verify(plan)
    assert plan.to_text() == (
        "0F0 0OFFLOAD0 0F1 0OFFLOAD1 0RELOAD0 0F2 0OFFLOAD2 0R0 0RELOAD1 0B0 0R1 0RELOAD2 0B1 "
        "0R2 0B2\n"
    )
    assert (
        planned(
            order.select({Op.FORWARD, Op.BACKWARD}), "recompute=early", offload=OffloadChoice()
        ).select(frozenset(Op) - {Op.ALL_REDUCE, Op.STEP})
        == plan
    )


def test_one_micro_batch_at_a_time_is_held_recomputed():
    plan = recompute_early(ORDER, [0])
    assert peak_recomputed(plan) == (1, 0)
    assert peak_activations(plan) == peak_activations(ORDER)
    assert peak_recomputed(Plan.from_text("0F0 0F1 0R0 0R1 0B0 0B1")) == (2,)
