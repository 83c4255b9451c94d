"""What holds for every schedule at every size, and for orders that nobody planned."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.fold3d.plan.ir import Action, Op, Plan
from megatron.fold3d.plan.memory import peak_activations
from megatron.fold3d.plan.ops import COMPUTE_OPS, RECV_OPS, SEND_OPS
from megatron.fold3d.plan.passes.grad_sync import add_grad_sync
from megatron.fold3d.plan.passes.offload import add_offload
from megatron.fold3d.plan.passes.recompute import recompute_early
from megatron.fold3d.plan.passes.shard_params import shard_params
from megatron.fold3d.plan.passes.transfers import add_p2p
from megatron.fold3d.plan.schedules import ONE_SEGMENT_SCHEDULES, SCHEDULES, SPLIT_SCHEDULES
from megatron.fold3d.plan.verify import verify
from tests.plan.test_loops import Player, refusal
from tests.plans import built, planned


@dataclass(frozen=True, kw_only=True)
class Case:
    schedule: str
    pp: int
    segments: int
    microbatches: int
    group_size: int

    def build(self) -> Plan:
        return built(
            self.schedule, self.pp, self.segments, self.microbatches, group_size=self.group_size
        )


@st.composite
def cases(draw: st.DrawFn, max_microbatches: int = 12) -> Case:
    schedule = draw(st.sampled_from(SCHEDULES))
    pp = draw(st.integers(1, 6))
    return Case(
        schedule=schedule,
        pp=pp,
        segments=1 if schedule in ONE_SEGMENT_SCHEDULES else draw(st.integers(1, 4)),
        microbatches=draw(st.integers(1, max_microbatches)),
        group_size=draw(st.integers(pp, 2 * pp + 2)),
    )


@st.composite
def unplanned_orders(draw: st.DrawFn) -> Plan:
    """Compute orders in which each rank picks any computation whose inputs are there."""
    num_ranks, num_segments = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    num_microbatches = draw(st.integers(1, 5))
    pick = draw(st.randoms(use_true_random=False))
    last = num_ranks * num_segments - 1
    programs: list[list[Action]] = [[] for _ in range(num_ranks)]
    forwards = [0] * (last + 1)  # micro-batches forwarded by each stage, in order
    done: set[Action] = set()
    while len(done) < 2 * (last + 1) * num_microbatches:
        ready = [
            Action(stage, Op.FORWARD, forwards[stage])
            for stage in range(last + 1)
            if forwards[stage] < (forwards[stage - 1] if stage else num_microbatches)
        ] + [
            action
            for stage in range(last + 1)
            for microbatch in range(forwards[stage])
            if (action := Action(stage, Op.BACKWARD, microbatch)) not in done
            and (stage == last or Action(stage + 1, Op.BACKWARD, microbatch) in done)
        ]
        action = pick.choice(ready)
        forwards[action.stage] += action.op is Op.FORWARD
        done.add(action)
        programs[action.stage % num_ranks].append(action)
    return Plan(tuple(map(tuple, programs)))


def recomputed(plan: Plan) -> Plan:
    return recompute_early(plan, range(1, plan.num_stages))


@pytest.mark.slow
@given(cases())
def test_every_schedule_can_run(case: Case):
    plan = case.build()
    verify(plan)
    for lowering in (
        recomputed,
        lambda plan: planned(shard_params(plan)),
        add_p2p,
        planned,
        add_offload,
    ):
        plan = lowering(plan)
        verify(plan)


@pytest.mark.slow
@given(cases(), st.data())
def test_ranks_may_offload_differently(case: Case, data: st.DataObject):
    plan = case.build()
    counts, depths = st.none() | st.integers(0, 20), st.integers(1, 4)
    lowered = [
        planned(add_offload(plan, depth=data.draw(depths), at_most=data.draw(counts)))
        for _ in plan.programs
    ]
    mixed = Plan(tuple(each.programs[rank] for rank, each in enumerate(lowered)))
    verify(mixed)
    assert mixed.select(frozenset(Op) - {Op.OFFLOAD, Op.RELOAD}) == planned(plan)


@given(unplanned_orders(), st.booleans(), st.integers(1, 4))
def test_transfers_of_any_order_that_can_run_cannot_deadlock(plan: Plan, late: bool, ahead: int):
    verify(add_grad_sync(add_p2p(plan, receives_late=late, receives_ahead=ahead)))


@given(cases())
def test_microbatches_are_first_in_first_out_both_ways(case: Case):
    order = defaultdict(list)
    for program in case.build().programs:
        for stage, op, microbatch in program:
            order[stage, op].append(microbatch)
    split = case.schedule in SPLIT_SCHEDULES
    assert len(order) == (2 + split) * case.pp * case.segments
    assert all(row == list(range(case.microbatches)) for row in order.values())


def largest_group(m: int, group_size: int, pp: int) -> int:
    """The groups hold ``group_size`` each; if the last would hold less than p, they share."""
    if m % group_size >= pp:
        return min(m, group_size)
    return -(-m // max(1, m // group_size))


PEAKS: dict[str, Callable[[Case, int], int]] = {
    "afab": lambda c, r: c.segments * c.microbatches,
    "1f1b": lambda c, r: min(c.microbatches, c.pp - r),
    "shifted-critical-path": lambda c, r: min(c.microbatches, c.pp - r + (r == c.pp - 2)),
    "zb-h1": lambda c, r: min(c.microbatches, c.pp),
    "zb-h2": lambda c, r: min(c.microbatches, 2 * c.pp - 1),
    "aiao": lambda c, r: (
        (c.segments - 1) * c.microbatches + min(c.microbatches, 2 * (c.pp - 1 - r) + 1)
    ),
    "breadth-first": lambda c, r: min(
        c.segments * c.microbatches, 2 * (c.pp - 1 - r) + (c.segments - 1) * c.microbatches + 1
    ),
    "interleaved": lambda c, r: min(
        c.segments * c.microbatches,
        2 * (c.pp - 1 - r)
        + (c.segments - 1) * largest_group(c.microbatches, c.group_size, c.pp)
        + 1,
    ),
}


@given(cases())
def test_peak_activations_match_their_formula(case: Case):
    formula = PEAKS[case.schedule]
    assert peak_activations(case.build()) == tuple(formula(case, r) for r in range(case.pp))


@given(st.one_of(cases().map(Case.build), unplanned_orders()))
def test_lowering_leaves_the_compute_order_alone(plan: Plan):
    for lowering in (add_p2p, planned, add_offload, recomputed):
        assert lowering(plan).select(COMPUTE_OPS - {Op.RECOMPUTE}) == plan


def needed_before(plan: Plan) -> dict[Action, int]:
    """Return, by computation, how many of its rank's computations its input depends on."""
    programs = [[a for a in program if a.op in COMPUTE_OPS] for program in plan.programs]
    done: dict[Action, list[int]] = {}  # how many of each rank, by computation
    needed, at = {}, [0] * plan.num_ranks
    while any(at[rank] < len(program) for rank, program in enumerate(programs)):
        for rank, program in enumerate(programs):
            while at[rank] < len(program):
                action = program[at[rank]]
                step = {Op.FORWARD: -1, Op.BACKWARD: 1}.get(action.op, 0)
                source = Action(action.stage + step, action.op, action.microbatch)
                if step and source.stage in range(plan.num_stages) and source not in done:
                    break
                before = done[program[at[rank] - 1]] if at[rank] else [0] * plan.num_ranks
                read = done[source] if source in done else [0] * plan.num_ranks
                needed[action] = read[rank]
                at[rank] += 1
                done[action] = [*map(max, before, read)]
                done[action][rank] = at[rank]
    return needed


@given(st.one_of(cases().map(Case.build), unplanned_orders()), st.booleans())
def test_a_receive_is_posted_a_computation_before_its_use_but_behind_what_it_depends_on(plan, late):
    # A computation in which the allocator waits for the device waits for what is posted before it.
    needed = needed_before(plan)
    for program in add_p2p(plan, receives_late=late).programs:
        started, posted = 0, {}
        for stage, op, microbatch in program:
            if op in RECV_OPS:
                user = Op.FORWARD if op is Op.RECV_F else Op.BACKWARD
                posted[Action(stage, user, microbatch)] = started
            elif op in COMPUTE_OPS:
                action = Action(stage, op, microbatch)
                if action in posted:
                    assert needed[action] <= posted[action]
                    assert late or posted[action] <= max(needed[action], 0, started - 1)
                started += 1


@given(st.one_of(cases().map(Case.build), unplanned_orders()))
def test_a_send_follows_the_computation_of_its_tensor(plan: Plan):
    for program in add_p2p(plan).programs:
        for before, (stage, op, microbatch) in pairwise(program):
            if op in SEND_OPS:
                made_by = Op.FORWARD if op is Op.SEND_F else Op.BACKWARD
                assert before == (stage, made_by, microbatch)


@pytest.mark.slow
@given(
    st.one_of(cases(max_microbatches=4).map(Case.build), unplanned_orders()),
    st.randoms(use_true_random=False),
)
@settings(max_examples=300)
def test_a_shuffled_plan_is_refused_exactly_if_it_cannot_run(plan: Plan, pick: Random):
    programs = [list(program) for program in add_p2p(plan).programs]
    for _ in range(pick.randint(1, 3)):
        program = pick.choice(programs)
        i = pick.randrange(len(program) - 1)
        program[i : i + 2] = reversed(program[i : i + 2])
    shuffled = Plan(tuple(map(tuple, programs)))
    assert (refusal(shuffled) is None) == Player(shuffled).can_run()
