import pytest

from megatron.fold3d.observe.critical_path import critical_path, path_seconds
from megatron.fold3d.observe.timeline import Lane, Span, Timeline
from megatron.fold3d.plan.ir import Action, Plan
from megatron.fold3d.plan.passes.grad_sync import add_grad_sync, serial_grad_sync
from megatron.fold3d.plan.passes.weight_grads import delay_weight_grads
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.simulate import simulate
from tests.plans import built, deferred_grad_sync

COSTS = {"p2p_s": 0.3, "p2p_latency_s": 0.01, "grad_sync_s": 7.0}


def names(timeline: Timeline) -> list[str]:
    return [f"{step.rank}:{step.span.action}" for step in critical_path(timeline)]


def test_the_path_of_two_ranks_by_hand():
    plan = Plan.from_text("0F0 0B0 0ALL_REDUCE 0STEP\n1F0 1B0 1ALL_REDUCE 1STEP\n")
    timeline = simulate(plan, Costs.uniform(2, p2p_s=0.5, grad_sync_s=3.0))
    assert names(timeline) == [
        *("0:0F0", "1:1RECV_F0", "1:1F0", "1:1B0"),
        *("0:0RECV_B0", "0:0B0", "0:0ALL_REDUCE"),
    ]
    seconds = {"forward_s": 2.0, "backward_s": 4.0, "p2p_s": 1.0, "grad_sync_s": 3.0}
    assert path_seconds(critical_path(timeline)) == seconds


def test_weight_gradients_that_hide_dp_sync_are_on_the_path_after_the_last_backward():
    plan = add_grad_sync(delay_weight_grads(Plan.from_text("0F0 1F0 1B0 0B0\n"), [1]))
    timeline = simulate(plan, Costs.uniform(2, grad_sync_s=0.5))
    assert names(timeline)[-3:] == ["0:0B0", "0:1W0", "0:1ALL_REDUCE"]
    seconds = {"forward_s": 2.0, "backward_s": 4.0, "grad_sync_s": 0.5}
    assert path_seconds(critical_path(timeline)) == seconds


@pytest.mark.parametrize("sync", [serial_grad_sync, add_grad_sync, deferred_grad_sync])
@pytest.mark.parametrize(("schedule", "segments"), [("1f1b", 1), ("interleaved", 3), ("aiao", 3)])
def test_the_steps_follow_each_other_and_add_up_to_the_makespan(sync, schedule, segments):
    order = built(schedule, 3, segments, 6)
    timeline = simulate(sync(order), Costs.uniform(order.num_stages, **COSTS), iterations=3)
    steps = critical_path(timeline)
    ends = [0.0, *(step.span.end_s for step in steps)]
    assert [step.start_s for step in steps] == pytest.approx(ends[:-1])
    assert sum(path_seconds(steps).values()) == pytest.approx(timeline.makespan_s)


def test_an_action_that_nothing_waits_for_is_not_on_the_critical_path():
    plan = built("1f1b", 2, 1, 4)
    slow = Costs(forward_s=(1.0, 5.0), backward_s=(1.0, 5.0))
    last_rank = [name for name in names(simulate(plan, slow)) if name.startswith("1:")]
    assert len([name for name in last_rank if "RECV" not in name]) == 8
    assert "0:0F3" not in names(simulate(plan, slow))


@pytest.mark.parametrize(("idle_s", "held_up"), [(0.05, False), (0.5, True)])
def test_a_message_taken_late_is_not_blamed_for_a_moment_of_idleness(idle_s, held_up):
    """Measured, a message seems to be under way until it is taken."""
    starts_s = 4.0 + idle_s
    timeline = Timeline.of(
        [
            [Span(Lane.COMPUTE, 0.0, 1.0, Action.from_str("0F0"))],
            [
                Span(Lane.COMPUTE, 0.5, 4.0, Action.from_str("1B1")),
                Span(Lane.P2P, 1.0, starts_s, Action.from_str("1RECV_F0")),
                Span(Lane.COMPUTE, starts_s, starts_s + 1, Action.from_str("1F0")),
            ],
        ]
    )
    assert ("1:1RECV_F0" in names(timeline)) is held_up


def test_an_empty_timeline_has_no_path():
    assert critical_path(Timeline(((), ()))) == ()
