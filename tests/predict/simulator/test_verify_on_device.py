"""Hardware queues: every schedule of ours ends with one, and what does not end is refused."""

import re
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.fold3d.plan.compile import forward_only
from megatron.fold3d.plan.device_queues import CONNECTIONS, MOST_OUTSTANDING, UNFINISHED_SENDS
from megatron.fold3d.plan.ir import Action, Op, Plan, PlanError
from megatron.fold3d.plan.ops import COMPUTE_OPS, RECV_OPS, SEND_OPS
from megatron.fold3d.plan.passes.grad_sync import aligned_grad_sync
from megatron.fold3d.plan.passes.offload import OffloadChoice
from megatron.fold3d.plan.passes.transfers import add_p2p
from megatron.fold3d.plan.schedules import FORWARDS_AHEAD, ONE_SEGMENT_SCHEDULES, SCHEDULES
from megatron.fold3d.plan.verify import verify
from megatron.fold3d.predict.simulator.device_run import verify_on_device
from megatron.fold3d.runtime.transfers import p2p
from tests.plans import built, planned

# Rank 0 posts the receive of 1B2's result while rank 1 needs 0F1 to come to it.
EARLY_RECEIVE = """
0F0 0SEND_F0 0RECV_B0 0RECV_B1 0RECV_B2 0F1 0SEND_F1 0F2 0SEND_F2 0B0 0B1 0B2
1RECV_F0 1RECV_F1 1F0 1F1 1RECV_F2 1F2 1B0 1SEND_B0 1B1 1SEND_B1 1B2 1SEND_B2
"""


@st.composite
def orders(draw: st.DrawFn) -> Plan:
    schedule = draw(st.sampled_from(SCHEDULES))
    pp = draw(st.integers(1, 8))
    return built(
        schedule,
        pp,
        1 if schedule in ONE_SEGMENT_SCHEDULES else draw(st.integers(1, 4)),
        draw(st.integers(1, 16)),
        group_size=draw(st.integers(pp, 2 * pp + 2)) if schedule == "interleaved" else None,
        forwards_ahead=draw(st.none() | st.integers(1, 3)) if schedule in FORWARDS_AHEAD else None,
    )


@st.composite
def ways(draw: st.DrawFn) -> Callable[..., Plan]:
    words = (("step=end", "step=next"), ("", ":wgrad=last@0"), ("", ":slices=on"))
    parts = "".join(draw(st.sampled_from(some)) for some in words)
    return partial(
        planned,
        parts=parts,
        gathers_params=draw(st.booleans()),
        offload=draw(st.sampled_from((None, OffloadChoice(), OffloadChoice(at_most=3, depth=2)))),
        grad_sync=draw(st.sampled_from(("overlap", "serial", "aligned"))),
        shares=draw(st.sampled_from(((), (0.0,) * 32, (0.7,) * 32, (1.0,) * 32))),
        receives_late=draw(st.booleans()),
    )


@pytest.mark.slow
@given(orders(), ways(), st.booleans(), st.sampled_from(CONNECTIONS), st.integers(1, 4))
def test_every_plan_of_ours_ends_on_a_gpu(order, made, tensor_parallel, connections, ahead):
    # Receives are posted so far ahead if the queues allow it.
    plan = made(order, receives_ahead=1 if connections == 1 else ahead)
    verify_on_device(plan, connections, tensor_parallel=tensor_parallel)


@pytest.mark.slow
@given(orders(), st.booleans())
def test_evaluation_and_plans_without_grad_sync_end_with_one_queue(order: Plan, tp: bool):
    verify_on_device(order, 1, tensor_parallel=tp)
    verify_on_device(forward_only(order), 1, tensor_parallel=tp)


def test_a_receive_that_is_posted_too_early_blocks_what_it_waits_for():
    plan = Plan.from_text(EARLY_RECEIVE)
    verify(plan)
    for connections in (8, 32):
        verify_on_device(plan, connections)
    with pytest.raises(PlanError) as refused:
        verify_on_device(plan, 1)
    message, *grid = str(refused.value).splitlines()
    assert message == (
        "deadlock with one hardware queue: rank 0 is held up at 0RECV_B2 until 0RECV_B0 is over; "
        "rank 1 is held up at 1F1 until 1RECV_F1 is over"
    )
    assert [re.findall(">(.*)<", row) for row in grid] == [["0RECV_B2"], ["1F1"]]


@pytest.mark.parametrize("posted", [MOST_OUTSTANDING - 1, MOST_OUTSTANDING])
def test_the_host_waits_when_nccl_has_no_room_left(posted):
    # Rank 0 posts its receives before it issues what the first of them waits for.
    microbatches = range(posted)
    receives = " ".join(f"0RECV_B{m}" for m in microbatches)
    forwards = " ".join(f"0F{m} 0SEND_F{m}" for m in microbatches)
    backwards = " ".join(f"0B{m}" for m in microbatches)
    other = " ".join(f"1RECV_F{m} 1F{m} 1B{m} 1SEND_B{m}" for m in microbatches)
    plan = Plan.from_text(f"{receives} {forwards} {backwards}\n{other}\n")
    verify(plan)
    if posted < MOST_OUTSTANDING:
        verify_on_device(plan, 32)
        return
    with pytest.raises(PlanError, match="rank 0's host waits at 0SEND_F0 with 64 of NCCL"):
        verify_on_device(plan, 32)


def test_the_last_sends_hold_up_computations_as_the_runtime_lets_them():
    assert p2p._UNFINISHED_SENDS == UNFINISHED_SENDS


def _message(action: Action) -> Action | None:
    """Return the receive of a send; None for other actions."""
    stage, op, microbatch = action
    if op is Op.SEND_F:
        return Action(stage + 1, Op.RECV_F, microbatch)
    return Action(stage - 1, Op.RECV_B, microbatch) if op is Op.SEND_B else None


def _hosts_end(plan: Plan, kind: Callable[[Action], object]) -> bool:
    """Say whether hosts end that wait for the whole device in the first action of each kind.

    What is posted or sent is in flight on the device until the other rank has issued its side.
    """
    at, seen = [0] * plan.num_ranks, [{None} for _ in plan.programs]
    posted: set[Action] = set()
    sent: set[Action | None] = set()  # by their receives

    def goes_on(rank: int) -> bool:
        before, action = plan.programs[rank][: at[rank]], plan.programs[rank][at[rank]]
        return kind(action) in seen[rank] or (
            {a for a in before if a.op in RECV_OPS} <= sent
            and {_message(a) for a in before if a.op in SEND_OPS} <= posted
        )

    moves = True
    while moves:
        moves = False
        for rank, program in enumerate(plan.programs):
            while at[rank] < len(program) and goes_on(rank):
                action = program[at[rank]]
                seen[rank].add(kind(action))
                sent.add(_message(action))
                posted |= {action} if action.op in RECV_OPS else set()
                at[rank] += 1
                moves = True
    return at == [*map(len, plan.programs)]


@given(orders(), ways())
def test_first_launches_of_kernels_which_wait_for_the_device_hang_no_rank(order, made):
    # CUDA loads a kernel's module when it is launched first, and waits for the device; autotuners
    # wait too. The first and the last stage have kernels of their own.
    ends = {0, order.num_stages - 1}

    def first(action: Action) -> object:
        return (action.op, *ends & {action.stage}) if action.op in COMPUTE_OPS else None

    assert _hosts_end(made(order), first)


def test_timers_that_wait_for_the_device_in_each_computation_hang_two_ranks():
    # As with `--timing-log-level 2`, which is refused.
    plan = add_p2p(built("aiao", 2, 2, 4))
    assert not _hosts_end(plan, lambda action: action if action.op in COMPUTE_OPS else None)


@pytest.mark.parametrize("schedule", ["interleaved", "breadth-first"])
def test_stocks_late_reductions_end_with_one_queue(schedule: str):
    order = built(schedule, 4, 2, 8)
    verify_on_device(aligned_grad_sync(order), 1, tensor_parallel=True)
