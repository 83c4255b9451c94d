"""All-to-alls of experts between nodes share NICs with messages and DP.sync."""

from dataclasses import replace

import pytest

from megatron.fold3d.observe.timeline import Lane, Timeline
from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.compile import Job, lower
from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.link import Device, Link
from megatron.fold3d.predict.simulator.simulate import simulate

FAIR = Link(preemptive=False)
PAIRED = replace(FAIR, overlap_tensor_parallel=True)
# A forward computes 1, sends 1, computes 1 and sends 1.
COSTS = Costs(
    forward_s=(4.0, 4.0),
    backward_s=(6.0, 6.0),
    ep_sync_s=(2.0, 2.0),
    ep_sync_on_nic=True,
    collectives=(2, 2),
    p2p_s=1.0,
)


def two_segments(word: str, num_microbatches: int) -> Plan:
    choice = Choice.parse(word, 2)
    job = Job(choice=choice, num_ranks=1, num_microbatches=num_microbatches)
    return lower(job, transfers=bool(choice.pairs))


def computed(timeline: Timeline, rank: int) -> list[tuple[float, float]]:
    return [(span.start_s, span.end_s) for span in timeline.lane(rank, Lane.COMPUTE)]


def test_with_a_nic_of_their_own_they_take_what_the_costs_say():
    plan = Plan.from_text("0F0 0B0 0F1 0B1")
    alone = replace(COSTS, forward_s=(4.0,), backward_s=(6.0,), ep_sync_s=(2.0,), collectives=(2,))
    assert computed(simulate(plan, alone, FAIR), 0) == [(0, 4), (4, 10), (10, 14), (14, 20)]


def test_a_message_and_an_all_to_all_share_the_link():
    plan = Plan.from_text("0F0 0F1\n1F0 1F1")
    # The message of 0F0 arrives at 5. That of 0F1 leaves at 8, when 1F0 sends for the second time:
    # each has half of the link, until 10.
    assert computed(simulate(plan, COSTS, FAIR), 1)[0] == (5.0, 10.0)
    # Inside a node all-to-alls have links of their own.
    inside = replace(COSTS, ep_sync_on_nic=False)
    assert computed(simulate(plan, inside, FAIR), 1)[0] == (5.0, 9.0)


@pytest.mark.parametrize("link", [FAIR, replace(FAIR, device=Device(connections=32))])
def test_dp_sync_that_hides_behind_experts_makes_them_slower(link: Link):
    plan = two_segments("breadth-first", 1)
    costs = replace(COSTS, grad_sync_s=(0.0, 1.5), p2p_s=0.0)
    spans = computed(simulate(plan, costs, link), 0)
    # 0B0 computes 2, sends 1, computes 2 and sends 1; DP.sync of 1.5 is over before it sends.
    assert spans[-1] == (14.0, 20.0)
    slower = replace(costs, grad_sync_s=(0.0, 4.0))
    # DP.sync has 2 left when the first all-to-all begins: half of the link for 2 seconds.
    assert computed(simulate(plan, slower, link), 0)[-1] == (14.0, 21.0)


def test_beside_pairs_dp_sync_takes_what_is_left_of_the_link():
    plan = two_segments("breadth-first:pairs=on", 2)
    bound = replace(COSTS, forward_s=(3.0, 3.0), backward_s=(3.0, 3.0), collectives=(), p2p_s=0.0)
    free = computed(simulate(plan, bound, PAIRED), 0)
    assert free[-1][1] == 4 * 4.0  # a pair sends 4 and computes 2
    synced = replace(bound, grad_sync_s=(0.0, 1.0))
    assert computed(simulate(plan, synced, PAIRED), 0)[-1][1] == 4 * 4.0 + 1.0


def test_a_pair_whose_link_has_time_left_hides_dp_sync():
    plan = two_segments("breadth-first:pairs=on", 2)
    bound = replace(COSTS, collectives=(), p2p_s=0.0, grad_sync_s=(0.0, 4.0))
    assert computed(simulate(plan, bound, PAIRED), 0)[-1][1] == 2 * 2 * (2.0 + 4.0)
