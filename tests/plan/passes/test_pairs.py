"""Pairs of micro-batches in a plan."""

from itertools import product

import pytest

from megatron.fold3d.plan.ir import Action, Op, Plan, Program
from megatron.fold3d.plan.ops import COMPUTE_OPS, RECV_OPS
from megatron.fold3d.plan.passes.offload import OffloadChoice
from megatron.fold3d.plan.passes.pairs import (
    PAIRED_OPS,
    chains,
    in_pairs,
    num_pairs,
    pair_microbatches,
)
from megatron.fold3d.plan.passes.transfers import add_p2p
from megatron.fold3d.plan.schedules import ONE_SEGMENT_SCHEDULES, SCHEDULES, SPLIT_SCHEDULES
from megatron.fold3d.plan.verify import verify
from tests.plan.test_properties import needed_before
from tests.plans import built, planned, verified


def order(schedule: str, m: int, *, p: int = 2, ns: int = 1) -> Plan:
    of_pairs = built(schedule, p, ns, num_pairs(m))
    return in_pairs(of_pairs, m)


def test_an_order_of_pairs_has_both_micro_batches_of_each_and_an_odd_one_alone():
    assert order("1f1b", 5).to_text().splitlines() == [
        "0F0 0F1 0F2 0F3 0B0 0B1 0F4 0B2 0B3 0B4",
        "1F0 1F1 1B0 1B1 1F2 1F3 1B2 1B3 1F4 1B4",
    ]


def test_a_result_is_sent_when_the_next_one_of_a_chain_has_begun():
    plan = verified(planned(order("afab", 5), "pairs=on"))
    assert plan.select(frozenset(Op) - {Op.ALL_REDUCE, Op.STEP}).to_text().splitlines() == [
        "0F0 0F1 0SEND_F0 0F2 0SEND_F1 0F3 0SEND_F2 0F4 0SEND_F3 0SEND_F4 0RECV_B0 "
        "0B0 0RECV_B1 0RECV_B2 0B1 0RECV_B3 0B2 0RECV_B4 0B3 0B4",
        "1RECV_F0 1RECV_F1 1F0 1RECV_F2 1F1 1RECV_F3 1F2 1RECV_F4 1F3 1F4 "
        "1B0 1B1 1SEND_B0 1B2 1SEND_B1 1B3 1SEND_B2 1B4 1SEND_B3 1SEND_B4",
    ]


@pytest.mark.parametrize("schedule", ["aiao", "afab", "1f1b"])
@pytest.mark.parametrize("p", [2, 3, 4])
def test_a_receive_in_a_chain_is_posted_behind_what_it_depends_on(schedule, p):
    # The computation before it goes on in the other thread, and may wait for the whole device.
    for segments, microbatches in product((1,) if schedule == "1f1b" else (1, 2), (2, 4, 8)):
        plan = planned(order(schedule, microbatches, p=p, ns=segments), "pairs=on")
        needed = needed_before(plan)
        for program in plan.programs:
            inside = {a for chain in chains(program) for a in chain if a.op in RECV_OPS}
            started = 0
            for action in program:
                started += action.op in COMPUTE_OPS
                if action in inside:
                    op = Op.FORWARD if action.op is Op.RECV_F else Op.BACKWARD
                    assert needed[Action(action.stage, op, action.microbatch)] < started


def test_copies_to_the_host_start_where_results_leave():
    plan = planned(
        order("aiao", 4, p=1, ns=2),
        "pairs=on",
        offload=OffloadChoice(),
        transfers=False,
        grad_sync="serial",
    )
    verify(plan)
    kept = plan.select(frozenset(Op) - {Op.ALL_REDUCE, Op.STEP}).to_text()
    assert kept.startswith("0F0 0F1 0OFFLOAD0 0F2 0OFFLOAD1 0F3 0OFFLOAD2 0OFFLOAD3 1F0 1F1 ")


def computed(program: Program) -> list[list[str]]:
    return [[str(a) for a in each if a.op in PAIRED_OPS] for each in chains(program)]


def test_a_chain_is_neighbours_of_one_stage_that_begin_with_an_even_one():
    text = "0F0 0F1 0F2 1F0 1F1 1F2 1B0 1B1 1B2 0B0 0STEP 0B1 0B2"
    (program,) = Plan.from_text(text).programs
    chained = [["0F0", "0F1", "0F2"], ["1F0", "1F1", "1F2"], ["1B0", "1B1", "1B2"]]
    assert computed(program) == chained


SIZES = [
    (schedule, p, ns)
    for schedule, p, ns in product(SCHEDULES, (1, 2, 3, 4), (1, 2, 3))
    if schedule not in SPLIT_SCHEDULES and (ns == 1 or schedule not in ONE_SEGMENT_SCHEDULES)
]


@pytest.mark.parametrize(("schedule", "p", "ns"), SIZES)
def test_every_schedule_runs_in_pairs_without_a_deadlock(schedule: str, p: int, ns: int):
    for m in range(1, 10):
        plan = order(schedule, m, p=p, ns=ns)
        verify(plan := pair_microbatches(add_p2p(plan) if p > 1 else plan))
        for rank, program in enumerate(plan.programs):
            expected = {
                str(Action(stage, op, j))
                for stage in range(rank, p * ns, p)
                for op in (Op.FORWARD, Op.BACKWARD)
                for j in range(m - m % 2)
            }
            assert expected <= {name for each in computed(program) for name in each}
