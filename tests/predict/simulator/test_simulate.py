import itertools
import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.fold3d.observe.exposure import exposure, mean
from megatron.fold3d.observe.fields import from_file
from megatron.fold3d.observe.timeline import Lane, Timeline
from megatron.fold3d.plan.ir import Action, Op, Plan, PlanError
from megatron.fold3d.plan.passes.grad_sync import add_grad_sync, serial_grad_sync
from megatron.fold3d.plan.passes.offload import add_offload
from megatron.fold3d.plan.passes.transfers import add_p2p
from megatron.fold3d.plan.passes.weight_grads import delay_weight_grads
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.link import Link
from megatron.fold3d.predict.simulator.simulate import simulate
from tests.plans import built, deferred_grad_sync

CASES = json.loads((Path(__file__).parents[2] / "data/simulator_vectors.json").read_text())["cases"]


def rows_of(timeline: Timeline, lane: Lane, rank: int = 0) -> list[tuple[float, float, str]]:
    """Start, end and action of a lane of a rank."""
    return [(s.start_s, s.end_s, str(s.action)) for s in timeline.lane(rank, lane)]


def compute_rows(timeline: Timeline) -> list[list[tuple[float, float, str]]]:
    """Start, end and action of every computation, rank by rank."""
    return [rows_of(timeline, Lane.COMPUTE, rank) for rank in range(timeline.num_ranks)]


def computed_s(timeline: Timeline, op: Op) -> float:
    """How long the first rank computed this op."""
    spans = timeline.lane(0, Lane.COMPUTE)
    return sum(span.duration_s for span in spans if span.action.op is op)


def run(case: dict[str, Any]) -> Timeline:
    """Simulate a pinned plan."""
    ranks, segments = case["p"], range(case["v"])
    programs = (
        tuple(Action(chunk * ranks + rank, Op(op), m) for op, m, chunk in order)
        for rank, order in enumerate(case["order"])
    )
    costs = Costs(
        forward_s=tuple(case["dur_f"]),
        backward_s=tuple(case["dur_b"]),
        p2p_s=case["x"],
        p2p_latency_s=case["lat"],
        grad_sync_s=tuple(case["dp"][rank][s] for s in segments for rank in range(ranks)),
    )
    synced = serial_grad_sync if case["dp_mode"] == "serial" else deferred_grad_sync
    link = Link(grad_sync_order="edf" if case["dp_mode"] == "edf" else "fifo")
    return simulate(synced(Plan(tuple(programs))), costs, link, iterations=case["iters"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["id"]))
def test_pinned_plans_take_the_time_that_is_expected(case):
    timeline, expected = run(case), case["expect"]
    exactly = partial(pytest.approx, rel=1e-9)  # both sum the same numbers, in their own order
    assert timeline.period_s == exactly(expected["period"])
    assert timeline.makespan_s == exactly(expected["makespan"])
    assert timeline.iteration_ends_s(0) == exactly(tuple(expected["end_of_iteration_rank0"]))


def test_1f1b_of_two_ranks_by_hand():
    timeline = simulate(built("1f1b", 2, 1, 2), Costs.uniform(2))
    assert compute_rows(timeline) == [
        [(0, 1, "0F0"), (1, 2, "0F1"), (4, 6, "0B0"), (7, 9, "0B1")],
        [(1, 2, "1F0"), (2, 4, "1B0"), (4, 5, "1F1"), (5, 7, "1B1")],
    ]


@pytest.mark.parametrize(("ranks", "segments", "microbatches"), [(2, 2, 8), (4, 1, 6), (4, 3, 8)])
@pytest.mark.parametrize("schedule", ["afab", "aiao", "interleaved", "breadth-first"])
def test_bubble_of_looped_schedules_is_p_minus_1_over_v_m(schedule, ranks, segments, microbatches):
    plan = built(schedule, ranks, segments, microbatches)
    found = mean(exposure(simulate(plan, Costs.uniform(plan.num_stages)))).bubble_ratio
    assert found == pytest.approx((ranks - 1) / (segments * microbatches))


def test_a_message_takes_its_latency_and_then_its_time():
    costs = Costs.uniform(2, p2p_s=0.25, p2p_latency_s=0.125)
    timeline = simulate(built("1f1b", 2, 1, 1), costs)
    assert rows_of(timeline, Lane.P2P, 1) == [(1.0, 1.375, "1RECV_F0")]
    assert timeline.makespan_s == 2 * 0.375 + 6


def test_p2p_goes_before_grad_sync_on_the_same_link():
    text = "0F0 0ALL_REDUCE 0STEP\n1F0\n"
    costs = Costs(forward_s=(1.0, 1.0), backward_s=(0.0, 0.0), p2p_s=2.0, grad_sync_s=(3.0, 0.0))
    alone = simulate(Plan.from_text(text), costs)
    assert alone.makespan_s == 1 + 2 + 3
    # As equals, both have half the link until the message has gone.
    fair = simulate(Plan.from_text(text), costs, Link(preemptive=False))
    assert fair.lane(1, Lane.P2P)[0].end_s == 5.0


def test_ranks_behind_one_nic_share_it_for_grad_sync_and_not_for_messages():
    text = "0F0 0ALL_REDUCE 0STEP\n1F0 1ALL_REDUCE 1STEP\n"
    costs = Costs(forward_s=(1.0, 1.0), backward_s=(0.0, 0.0), p2p_s=9.0, grad_sync_s=(2.0, 2.0))
    timeline = simulate(Plan.from_text(text), costs, Link(nic_of_rank=(0, 0)))
    # 1 to 2: rank 0 alone; 2 to 4: half each; 4 to 5: rank 1 alone.
    assert [timeline.lane(rank, Lane.GRAD_SYNC)[-1].end_s for rank in (0, 1)] == [4.0, 5.0]


def test_edf_lets_the_segment_that_is_needed_first_overtake():
    text = "0F0 1F0 1B0 1ALL_REDUCE 0B0 0ALL_REDUCE 0STEP 1STEP\n"
    costs = Costs.uniform(2, grad_sync_s=5.0)
    edf = simulate(Plan.from_text(text), costs, Link(grad_sync_order="edf"))
    rows = rows_of(edf, Lane.GRAD_SYNC)
    assert rows == [(4, 6, "1ALL_REDUCE"), (6, 11, "0ALL_REDUCE"), (11, 14, "1ALL_REDUCE")]
    fifo = simulate(Plan.from_text(text), costs)
    assert rows_of(fifo, Lane.GRAD_SYNC) == [(4, 9, "1ALL_REDUCE"), (9, 14, "0ALL_REDUCE")]


def test_serial_grad_sync_is_all_exposed_and_aiao_hides_all_but_one_segment():
    costs = Costs.uniform(4, grad_sync_s=3.0)
    compute = built("aiao", 2, 2, 4)
    alone = simulate(compute, costs).makespan_s
    assert simulate(serial_grad_sync(compute), costs).makespan_s == alone + 2 * 3.0
    assert simulate(add_grad_sync(compute), costs).makespan_s == alone + 3.0


def test_deferred_grad_sync_shows_from_the_second_iteration_on():
    costs = Costs.uniform(4, grad_sync_s=3.0)
    deferred = deferred_grad_sync(built("aiao", 2, 2, 4))
    timeline = simulate(deferred, costs, iterations=3)
    first, second, third = timeline.iteration_ends_s(0)
    assert first == simulate(built("aiao", 2, 2, 4), costs).makespan_s
    assert second - first == third - second == first + 3.0


def test_steps_at_the_end_hold_all_ranks_until_the_last_has_ended():
    plan = add_grad_sync(built("1f1b", 3, 1, 3))
    assert plan.flushes
    timeline = simulate(plan, Costs.uniform(3), iterations=2)
    ends = {timeline.iteration_ends_s(rank) for rank in range(3)}
    assert ends == {(15.0, 30.0)}


def test_a_plan_that_cannot_end_is_refused_with_the_actions_that_wait():
    stuck = Plan.from_text("0F0 2F0 2B0 0B0\n1B0 1F0 3F0 3B0\n")
    with pytest.raises(PlanError, match="rank 0 at 2F0, rank 1 at 1B0"):
        simulate(stuck, Costs.uniform(4))


def test_costs_of_another_plan_are_refused():
    with pytest.raises(PlanError, match="2 numbers in forward_s; a plan of 4 stages"):
        simulate(built("aiao", 2, 2, 2), Costs.uniform(2))
    with pytest.raises(PlanError, match="seconds are zero or more"):
        simulate(built("1f1b", 2, 1, 2), Costs.uniform(2, forward_s=-1.0))
    with pytest.raises(PlanError, match="3 NICs; the plan has 2 ranks"):
        simulate(built("1f1b", 2, 1, 2), Costs.uniform(2), Link(nic_of_rank=(0, 1, 2)))
    costs = Costs(forward_s=(1.0,), backward_s=(2.0,), weight_s=(4.0,))
    with pytest.raises(PlanError, match=r"found 4\.0 in weight_s; it is a part of a backward of 2"):
        costs.check(1)


def test_costs_come_back_from_a_file(tmp_path):
    costs, file = Costs.uniform(4, p2p_s=0.5, grad_sync_s=1.0), tmp_path / "costs.json"
    file.write_text(costs.to_json())
    assert from_file(file, Costs, "cost table") == costs


sizes = st.tuples(st.integers(2, 4), st.integers(1, 3), st.integers(1, 5))


@pytest.mark.slow
@given(sizes, st.sampled_from(["afab", "aiao", "interleaved"]), st.sampled_from([0.0, 0.3, 1.7]))
def test_explicit_transfers_change_nothing(sizes, schedule, p2p_s):
    ranks, segments, microbatches = sizes
    if schedule == "interleaved" and microbatches % ranks:
        return
    compute = built(schedule, ranks, segments, microbatches)
    costs = Costs.uniform(ranks * segments, p2p_s=p2p_s, p2p_latency_s=0.1)
    assert simulate(compute, costs) == simulate(add_p2p(compute), costs)


@pytest.mark.slow
@given(sizes, st.floats(0.0, 2.0), st.floats(0.0, 6.0))
def test_no_rank_does_two_things_at_once_and_every_computation_runs(sizes, p2p_s, grad_sync_s):
    ranks, segments, microbatches = sizes
    compute = built("aiao", ranks, segments, microbatches)
    costs = Costs.uniform(ranks * segments, p2p_s=p2p_s, grad_sync_s=grad_sync_s)
    lowered = add_grad_sync(add_offload(add_p2p(compute)))
    for rank, row in enumerate(compute_rows(simulate(lowered, costs, iterations=2))):
        assert [word for _, _, word in row] == 2 * [str(a) for a in compute.programs[rank]]
        assert all(end <= start for (_, end, _), (start, _, _) in itertools.pairwise(row))


def test_weight_gradients_have_their_own_cost():
    split = Plan.from_text("0F0 0B0 0W0\n")
    costs = Costs(forward_s=(1.0,), backward_s=(6.0,), weight_s=(4.0,), split_s=0.5)
    timeline = simulate(split, costs)
    assert timeline.makespan_s == 7.5
    assert computed_s(timeline, Op.BACKWARD) == 2.0
    assert computed_s(timeline, Op.WEIGHT) == 4.5


def test_a_backward_that_is_not_split_computes_its_weight_gradients():
    plan = delay_weight_grads(built("aiao", 1, 2, 2), [1])
    costs = Costs(forward_s=(1.0, 1.0), backward_s=(3.0, 5.0), weight_s=(1.0, 2.0))
    timeline = simulate(plan, costs)
    taken = [(str(s.action), s.duration_s) for s in timeline.lane(0, Lane.COMPUTE)]
    assert taken[-4:] == [("0B0", 3.0), ("0B1", 3.0), ("1W0", 2.0), ("1W1", 2.0)]
    assert computed_s(timeline, Op.BACKWARD) == 2 * (3.0 + 5.0 - 2.0)


@pytest.mark.slow
def test_the_time_of_a_simulation_grows_with_the_number_of_actions():
    # The larger one is that of 3,072 GPUs: pp=64 of dp=6 and tp=8; replicas do the same, so one
    # is run. It has 16 times the actions: 4 times the ranks, 4 times the micro-batches. A step that
    # looked at all of either would make it 64 times as long.
    def simulation_s(ranks: int, microbatches: int) -> float:
        plan = deferred_grad_sync(built("aiao", ranks, 4, microbatches))
        costs = Costs.uniform(4 * ranks, p2p_s=0.1, p2p_latency_s=0.01, grad_sync_s=30.0)
        start_s = time.process_time()
        simulate(plan, costs, Link(grad_sync_order="edf"))
        return time.process_time() - start_s

    assert simulation_s(64, 256) < 3 * 16 * simulation_s(16, 64)


def test_a_rank_may_wait_for_what_it_sends():
    plan = Plan.from_text("0F0 0F1\n1F0 1F1\n")
    costs = Costs(forward_s=(1.0, 1.0), backward_s=(0.0, 0.0), p2p_s=2.0)
    waiting = Link(sends_waited_for=frozenset({Op.FORWARD}))
    timeline = simulate(plan, costs, waiting)
    assert [row[:2] for row in compute_rows(timeline)[0]] == [(0, 1), (3, 4)]
    assert rows_of(timeline, Lane.WAIT) == [(1, 3, "0SEND_F0"), (4, 6, "0SEND_F1")]
    assert timeline.makespan_s == 7
    buffered = replace(costs, sends_are_buffered=True)
    assert simulate(plan, buffered, waiting) == simulate(plan, costs)


def test_messages_of_one_channel_go_one_after_the_other():
    costs = Costs(forward_s=(1.0, 1.0), backward_s=(0.0, 0.0), p2p_s=2.0)
    timeline = simulate(Plan.from_text("0F0 0F1\n1F0 1F1\n"), costs)
    assert [row[:2] for row in rows_of(timeline, Lane.P2P, 1)] == [(1.0, 3.0), (2.0, 5.0)]


def test_what_is_left_of_a_sum_starts_in_the_next_iteration():
    plan = Plan.from_text("1ALL_REDUCE 0STEP 0F0 1STEP 1F0 1B0 1ALL_REDUCE:500 0B0 0ALL_REDUCE\n")
    timeline = simulate(plan, Costs.uniform(2, grad_sync_s=4.0), iterations=2)
    # Half of 1 behind 0B0; then 0, which the next forward needs first, and the rest of 1. In the
    # first iteration nothing is left.
    assert rows_of(timeline, Lane.GRAD_SYNC)[:3] == [
        (4, 6, "1ALL_REDUCE:500"),
        (6, 10, "0ALL_REDUCE"),
        (10, 12, "1ALL_REDUCE"),
    ]
    assert rows_of(timeline, Lane.WAIT) == [(6, 10, "0ALL_REDUCE"), (11, 12, "1ALL_REDUCE")]
    assert [row[0] for row in rows_of(timeline, Lane.COMPUTE)[4:6]] == [10, 12]


def test_a_step_waits_for_one_part_after_the_other():
    plan = Plan.from_text("0F0 0B0 0ALL_REDUCE:250 0ALL_REDUCE 0STEP")
    timeline = simulate(plan, Costs.uniform(1, grad_sync_s=4.0))
    waits = [(3, 4, "0ALL_REDUCE:250"), (4, 7, "0ALL_REDUCE")]
    assert rows_of(timeline, Lane.WAIT) == waits


def test_a_part_takes_its_share_of_the_sum():
    plan = Plan.from_text(
        "0STEP 0F0 0F1 0B0 0B1 0W:500 0ALL_REDUCE:500 0W:1000 0ALL_REDUCE:750 0ALL_REDUCE"
    )
    costs = Costs(forward_s=(1.0,), backward_s=(3.0,), weight_s=(1.0,), grad_sync_s=(4.0,))
    found = [row[:2] for row in rows_of(simulate(plan, costs), Lane.GRAD_SYNC)]
    assert found == [(7.0, 9.0), (9.0, 10.0), (10.0, 11.0)]


def test_a_reduction_to_shards_starts_when_shards_are_complete():
    plan = Plan.from_text(
        "0ALL_GATHER 0F0 0F1 0B0 0B1 0W:500 0REDUCE_SCATTER:500 0W:1000 0REDUCE_SCATTER 0STEP"
    )
    costs = replace(Costs.uniform(1, backward_s=3.0, grad_sync_s=4.0), weight_s=(1.0,))
    costs = replace(costs, param_gather_s=(1.0,))
    shares = ((0.4, 0.25), (0.6, 0.5), (1.0, 1.0))
    seconds = [simulate(plan, costs, Link(shard_shares=s)).period_s for s in ((), shares)]
    assert seconds == [8.0 + 4.0, 9.0 + 3.0]
    whole = Plan.from_text("0F0 0F1 0B0 0B1 0W:500 0ALL_REDUCE:500 0W:1000 0ALL_REDUCE 0STEP")
    assert simulate(whole, costs, Link(shard_shares=shares)).period_s == 7.0 + 4.0


def test_a_gather_goes_before_what_the_next_stage_has_to_reduce():
    plan = Plan.from_text(
        "0STEP 0ALL_GATHER 1REDUCE_SCATTER 0F0 1STEP 1ALL_GATHER 1F0 "
        "1B0 1REDUCE_SCATTER:500 0B0 0REDUCE_SCATTER\n"
    )
    costs = replace(Costs.uniform(2, grad_sync_s=4.0), param_gather_s=(3.0, 3.0))
    timeline = simulate(plan, costs, iterations=3)
    begin_s = timeline.iteration_ends_s(0)[1]
    rows = [
        (start_s - begin_s, end_s - begin_s, word)
        for start_s, end_s, word in rows_of(timeline, Lane.GRAD_SYNC)
        if 0 <= start_s - begin_s < 12
    ]
    # 0's whole reduce-scatter has begun with the iteration before; the rest of 1's waits for it.
    assert sorted(rows) == [
        (0, 4, "0REDUCE_SCATTER"),
        (4, 7, "0ALL_GATHER"),
        (7, 9, "1REDUCE_SCATTER"),
        (9, 12, "1ALL_GATHER"),
    ]


def test_what_megatron_reads_at_the_end_is_waited_for_there():
    kept = replace(Costs.uniform(1, grad_sync_s=4.0), reduced_in_iteration_s=(1.0,))
    for sums in ("0ALL_REDUCE", "0ALL_REDUCE:250 0ALL_REDUCE"):
        plan = Plan.from_text(f"0STEP 0F0 0B0 0REDUCE_KEPT {sums} 0FINALIZE\n")
        timeline = simulate(plan, kept, iterations=2)
        assert rows_of(timeline, Lane.WAIT)[0] == (3, 5, "0REDUCE_KEPT")
        # Its second of work shares the link with the rest, so it takes two.
        assert timeline.iteration_ends_s(0)[0] == 3 + 2
        assert timeline.period_s == 2 + 3 + 2


def test_a_rank_without_work_is_a_bubble():
    plan = built("1f1b", 2, 1, 2)
    costs = Costs(forward_s=(1.0, 0.0), backward_s=(2.0, 0.0))
    busy, idle = exposure(simulate(plan, costs))
    assert (busy.total_s, idle.bubble_s, idle.total_s) == (6.0, 6.0, 6.0)
    assert idle.bubble_ratio == 0.0
    nothing = exposure(simulate(plan, Costs.uniform(2, forward_s=0.0, backward_s=0.0)))
    assert all(row.share(row.bubble_s) == 0.0 for row in nothing)


def test_messages_that_fill_a_link_delay_dp_sync_no_longer_than_their_budget():
    text = "0F0 0F1 0F2 0F3 0F4 0F5 0ALL_REDUCE 0STEP\n1F0 1F1 1F2 1F3 1F4 1F5\n"
    costs = Costs(forward_s=(0.1, 0.1), backward_s=(0.0, 0.0), p2p_s=1.0, grad_sync_s=(1.0, 0.0))

    def ends_s(pause_share: float) -> float:
        link = Link(pause_share=pause_share)
        timeline = simulate(Plan.from_text(text), costs, link)
        return timeline.lane(0, Lane.GRAD_SYNC)[-1].end_s

    # The link is full from 0.1 to 6.1; DP.sync is there from 0.6 on.
    assert ends_s(1.0) == pytest.approx(7.1)
    # In each second from there it waits 0.35 and has half of the link for 0.65: 0.325 twice
    # until 2.6, once more until 3.6, and the last 0.025 after a fourth pause.
    assert ends_s(0.35) == pytest.approx(3.95 + 0.05)
    assert ends_s(0.0) == pytest.approx(0.6 + 2.0)
