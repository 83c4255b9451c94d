"""Plans on GPUs whose streams share hardware queues, in seconds. No GPU has confirmed them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.fold3d.config.fold3d_config import SLICE_BYTES as TRAINING_SLICE_BYTES
from megatron.fold3d.observe.exposure import exposure
from megatron.fold3d.observe.timeline import BUSY_LANES, Lane, Timeline
from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.plan.passes.offload import OffloadChoice
from megatron.fold3d.plan.schedules import ONE_SEGMENT_SCHEDULES, SCHEDULES
from megatron.fold3d.predict.cost_model.launches import SLICE_BYTES, launches
from megatron.fold3d.predict.cost_model.sizes import Setup
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.link import Device, Link, sends_stock_waits_for
from megatron.fold3d.predict.simulator.simulate import simulate
from tests.plans import built, planned

OVERLAPPED, DEFERRED = "", "step=next"

# GPT-3 18B on pp=2, tp=8, dp=8: 4 segments, 8 micro-batches; computation and DP.sync take 2560 ms
# each. Of one rank: 20 ms forward, 60 backward with recomputation, 640 for a segment's DP.sync of
# 1.1 GB, in 7 buckets of Megatron's default size or 137 slices of 8 MiB.
SEGMENTS, MICROBATCHES = 4, 8
MS = Costs.uniform(SEGMENTS, forward_s=20.0, backward_s=60.0, grad_sync_s=640.0)


def order(num_ranks: int = 1) -> Plan:
    return built("aiao", num_ranks, SEGMENTS, MICROBATCHES)


def period(parts: str, device: Device, share: float | None = None) -> float:
    """The steady iteration of one rank, in ms."""
    link = Link(preemptive=False, device=device)
    plan = planned(order(), parts, shares=() if share is None else (share,) * SEGMENTS)
    return simulate(plan, MS, link, iterations=4).period_s


@pytest.mark.parametrize(
    ("connections", "whole", "buckets", "shared"),
    [(1, 3680.0, 4640.0, 5098.0), (32, 3680.0, 3629.0, 3678.0)],
)
def test_18b_takes_what_the_queue_model_says(connections, whole, buckets, shared):
    assert simulate(order(), MS).period_s == 2560
    one = Device(connections=connections)
    assert period(OVERLAPPED, one) == pytest.approx(whole)
    cut = replace(one, launches=(7,) * SEGMENTS, in_backward=True)
    assert period(OVERLAPPED, cut) == pytest.approx(buckets, abs=0.5)
    # That model names no number of slices and no limit of NCCL's: 137 are ours, 5101 and 3680.
    sliced = replace(one, launches=(137,) * SEGMENTS, most_outstanding=None)
    assert period(DEFERRED, sliced, share=0.5) == pytest.approx(shared, rel=1e-3)


def test_buckets_inside_a_backward_hold_up_the_other_rank_too():
    # Rank 1's last backward ends when all but its last bucket are reduced; only then rank 0's
    # begins, and ends as late. Each segment pays for both.
    costs = Costs.uniform(2 * SEGMENTS, forward_s=20.0, backward_s=60.0, grad_sync_s=640.0)
    plan = planned(order(2), OVERLAPPED)
    flushed = Link(preemptive=False, device=Device(connections=1))
    whole = simulate(plan, costs, flushed).period_s
    cut = Device(connections=1, launches=(7,) * 2 * SEGMENTS, in_backward=True)
    buckets = simulate(plan, costs, replace(flushed, device=cut)).period_s
    assert whole == pytest.approx(3760)
    assert buckets == pytest.approx(6468.57, abs=0.01)


def test_the_host_waits_where_nccl_has_no_room_for_more_slices():
    # With a queue for each stream slices hold up nothing, but the host that issues them.
    slices = Device(connections=32, launches=(137,) * SEGMENTS)
    free = replace(slices, most_outstanding=None)
    assert period(DEFERRED, slices, share=0.5) > 1.05 * period(DEFERRED, free, share=0.5)
    few = replace(slices, launches=(20,) * SEGMENTS)
    assert period(DEFERRED, few, share=0.5) == pytest.approx(period(DEFERRED, free, share=0.5))


def test_a_reduction_waits_behind_the_one_before_in_its_stream_and_computation_behind_it():
    # Segments 2 and 0 are even: 0ALL_REDUCE begins when 2ALL_REDUCE is over, and what follows it as
    # well. 1ALL_REDUCE has a stream of its own, and shares the link.
    plan = Plan.from_text("0F0 1F0 2F0 2B0 2ALL_REDUCE 1B0 1ALL_REDUCE 0B0 0ALL_REDUCE\n")
    costs = Costs.uniform(3, grad_sync_s=8.0)
    timeline = simulate(plan, costs, Link(device=Device(connections=1)))
    assert [
        (span.lane, span.start_s, span.end_s, str(span.action))
        for span in timeline.ranks[0]
        if span.lane in (Lane.GRAD_SYNC, Lane.WAIT)
    ] == [
        (Lane.GRAD_SYNC, 5, 19, "2ALL_REDUCE"),
        (Lane.GRAD_SYNC, 7, 23, "1ALL_REDUCE"),
        (Lane.WAIT, 9, 19, "0ALL_REDUCE"),
        (Lane.GRAD_SYNC, 19, 29, "0ALL_REDUCE"),
    ]
    (row,) = exposure(timeline)
    assert row.grad_sync_s == 10
    many = simulate(plan, costs, Link(device=Device(connections=8)))
    assert many.makespan_s == 9


def test_stock_has_one_stream_for_all_of_its_reductions():
    plan = Plan.from_text("0F0 1F0 1B0 1ALL_REDUCE 0B0 0ALL_REDUCE\n")
    costs = Costs.uniform(2, grad_sync_s=8.0)
    one = Device(connections=1)
    ours, stock = (
        simulate(plan, costs, Link(device=one, sends_waited_for=waits))
        for waits in (frozenset(), sends_stock_waits_for(num_segments=2))
    )
    assert exposure(ours)[0].grad_sync_s == 0
    assert exposure(stock)[0].grad_sync_s == 6


@pytest.mark.parametrize("p2p_s", [2.0, 3.0, 4.0])  # a forward takes 1
def test_messages_longer_than_a_forward_follow_each_other_with_one_queue(p2p_s):
    # One receive is open while another is in flight: they are of an even and an odd micro-batch.
    order = built("1f1b", 8, 1, 32, forwards_ahead=3)
    plan, costs = planned(order, receives_late=True), Costs.uniform(8, p2p_s=p2p_s)
    one, many = (
        simulate(plan, costs, Link(device=Device(connections=n))).period_s for n in (1, 32)
    )
    assert one < 1.005 * many


@st.composite
def runs(draw: st.DrawFn) -> tuple[Plan, Costs, Link]:
    schedule = draw(st.sampled_from(SCHEDULES))
    ranks = draw(st.integers(1, 5))
    segments = 1 if schedule in ONE_SEGMENT_SCHEDULES else draw(st.integers(1, 4))
    plan = built(schedule, ranks, segments, draw(st.integers(1, 10)))
    deferred = draw(st.booleans())
    offload = draw(st.sampled_from((None, OffloadChoice())))
    stages = plan.num_stages
    costs = replace(
        Costs.uniform(
            stages,
            p2p_s=draw(st.sampled_from((0.0, 0.25))),
            grad_sync_s=draw(st.sampled_from((0.0, 5.0))),
        ),
        optimizer_s=(0.125,) * stages,
        param_gather_s=(2.0,) * stages,
        offload_s=(0.25,) * stages,
        reload_s=(0.25,) * stages,
    )
    return (
        planned(
            plan,
            f"step={'next' if deferred else 'end'}:slices={draw(st.sampled_from(('on', 'off')))}",
            transfers=False,
            offload=offload,
            gathers_params=not deferred,
            shares=draw(st.sampled_from(((), (0.5,) * stages))),
        ),
        costs,
        Link(preemptive=False),
    )


@pytest.mark.slow
@given(runs())
def test_a_queue_for_each_stream_is_what_is_simulated_without_a_device(run):
    # As long as a message takes less than a computation, so that receives are posted in time.
    plan, costs, link = run
    usual = simulate(plan, costs, link, iterations=3)
    device = Device(connections=32)
    queued = simulate(plan, costs, replace(link, device=device), iterations=3)
    if not plan.flushes and costs.p2p_s and costs.grad_sync_s[0]:
        # Messages that share their link with DP.sync delay ranks, which then post receives late.
        assert queued.period_s > (1 - 1e-12) * usual.period_s
        return
    assert queued.iteration_ends_s(0) == pytest.approx(usual.iteration_ends_s(0), rel=1e-12)
    # Messages on one link may change places, and so move computations by one, but not the end.
    moved_s = costs.p2p_s * max(len(usual.lane(r, Lane.COMPUTE)) for r in range(plan.num_ranks))
    assert [compute(queued, r) for r in range(plan.num_ranks)] == pytest.approx(
        [compute(usual, r) for r in range(plan.num_ranks)], rel=1e-6, abs=moved_s
    )


@pytest.mark.slow
@given(runs(), st.booleans())
def test_one_queue_ends_and_its_times_add_up(run: tuple[Plan, Costs, Link], stock: bool):
    plan, costs, link = run
    if stock:
        waits = sends_stock_waits_for(plan.num_segments)
        link = replace(link, sends_waited_for=waits)
    cut = Device(connections=1, launches=(3,) * plan.num_stages, in_backward=not stock)
    timeline = simulate(plan, costs, replace(link, device=cut), iterations=2)
    for spans in timeline.ranks:
        free_s = 0.0
        for span in (span for span in spans if span.lane in BUSY_LANES):
            assert span.start_s >= free_s
            free_s = span.end_s
    for rank, row in enumerate(exposure(timeline)):
        begun_s, ended_s = timeline.iteration_ends_s(rank)
        assert row.total_s == pytest.approx(ended_s - begun_s)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_slices_between_computations_hold_up_nothing_in_one_queue(num_ranks):
    # 640 ms of DP.sync and 480 ms of a segment's backwards: three quarters fit behind them.
    stages = num_ranks * SEGMENTS
    costs = Costs.uniform(stages, forward_s=20.0, backward_s=60.0, grad_sync_s=640.0)
    plan = planned(order(num_ranks), "step=next:slices=on", shares=(0.75,) * stages)
    one, many = (
        simulate(plan, costs, Link(device=Device(connections=n)), iterations=4).period_s
        for n in (1, 32)
    )
    assert one <= 1.002 * many
    # No gradients exist from the last segment's forward to the end of its backward, 640 ms: with
    # 2560 ms of DP.sync nothing takes less than 3200.
    assert 3200 <= one <= 3206 + 80 * (num_ranks - 1)


def test_the_slices_of_a_stage_take_the_time_of_its_dp_sync():
    plan = planned(order(), "step=next:slices=on", shares=(0.3,) * SEGMENTS)
    timeline = simulate(plan, MS, iterations=3)
    for stage in range(SEGMENTS):
        spans = [
            span
            for span in timeline.lane(0, Lane.GRAD_SYNC)
            if span.action and span.action.stage == stage and span.iteration == 1
        ]
        assert len(spans) == (1 if stage == 0 else 16)
        assert sum(span.duration_s for span in spans) == pytest.approx(640)


def compute(timeline: Timeline, rank: int) -> float:
    return sum(span.end_s for span in timeline.lane(rank, Lane.COMPUTE))


def test_dp_sync_is_launched_as_training_cuts_it():
    assert TRAINING_SLICE_BYTES["cuda"] == SLICE_BYTES
    gradients, setup = (1.12e9, 0.1e9), Setup(tensor_parallel=8, data_parallel=8)

    def cut(setup: Setup, connections: int, *, deferred: bool = False) -> tuple[int, ...]:
        return launches(gradients, setup, deferred=deferred, connections=connections)

    assert cut(setup, 8) == (7, 1)
    assert cut(setup, 8, deferred=True) == (140, 12)
    # One queue: no buckets.
    assert cut(setup, 1) == (1, 1)
    assert cut(setup, 1, deferred=True) == (134, 12)
    sharded = replace(setup, distributed_optimizer=True)
    assert cut(sharded, 1) == cut(sharded, 8) == (1, 1)
    # Megatron's default is a million parameters per replica where that is more.
    many = replace(setup, data_parallel=80)
    assert cut(many, 8) == (4, 1)
