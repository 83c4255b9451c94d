"""Simulate a measured run: its order with its costs, without the machine's noise.

The costs are the measured times of actions without waiting, which the simulator adds. If simulation
and measurement differ, the machine does something that is not simulated.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import inf
from statistics import median, quantiles

from megatron.fold3d.observe.timeline import BUSY_LANES, Lane, Span, Timeline, queued
from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.compile import GradSync, Job, lower
from megatron.fold3d.plan.ir import Action, Op, Plan, PlanError
from megatron.fold3d.plan.ops import COMPUTE_OPS, GATHER_OPS
from megatron.fold3d.plan.passes.recompute import recomputed
from megatron.fold3d.plan.passes.weight_grads import split_stages
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.link import Link
from megatron.fold3d.predict.simulator.simulate import simulate, steady_state


def observed_plan(measured: Timeline) -> Plan:
    """Return the order in which the ranks computed, with DP.sync at the place where it began.

    A segment is reduced to shards if the trace has its REDUCE_SCATTER.

    Raises:
        PlanError: the ranks recorded no whole iteration.
    """
    programs = []
    for rank in range(measured.num_ranks):
        spans = measured.lane(rank, Lane.COMPUTE)
        actions = (s.action for s in spans if s.iteration == 0 and s.action is not None)
        programs.append(tuple(dict.fromkeys(actions)))  # an interrupted action has several spans
    plan = checked_size(Plan(tuple(programs)))
    return as_synced(_with_sums(plan, measured), measured)


def checked_size(plan: Plan) -> Plan:
    """Return a trace's plan, after checking its stages and micro-batches against its actions.

    Without this check, one wrong number in a file could make the simulation endless.

    Raises:
        PlanError: the plan has fewer actions than its stages have micro-batches.
    """
    num_actions, needed = sum(map(len, plan.programs)), plan.num_stages * plan.num_microbatches
    if num_actions < needed:
        raise PlanError(
            f"{num_actions} actions for {plan.num_stages} stages and {plan.num_microbatches} "
            f"micro-batches, which have {needed} forwards; trace whole iterations"
        )
    return plan


def as_synced(plan: Plan, measured: Timeline) -> Plan:
    """Return the plan with all DP.sync at its end, unless DP.sync overlapped computation."""
    if _overlaps(measured):
        return plan
    return _with_sums(plan.select(COMPUTE_OPS), measured, "serial")


def _with_sums(plan: Plan, measured: Timeline, grad_sync: GradSync = "overlap") -> Plan:
    """Return the plan with sums; each segment's sum is of the kind that the trace shows."""
    sums = {s.action for spans in measured.ranks for s in spans if s.lane is Lane.GRAD_SYNC}
    in_shards = {a.stage // plan.num_ranks for a in sums if a and a.op is Op.REDUCE_SCATTER}
    whole = {*range(plan.num_segments)} - in_shards
    choice = Choice.plain("plan", plan.num_segments).changed(whole, optimizer="replicated")
    job = Job.of(plan, choice, steps_shards=bool(in_shards), grad_sync=grad_sync)
    return lower(job, transfers=False)


def observed_costs(measured: Timeline, plan: Plan) -> Costs:
    """Return the costs of a plan's actions, from a measured run.

    The cost of a computation is the median of its times; a backward includes the weight gradients
    that were split from it. The cost of a message, and of a stage's DP.sync, is a shortest time,
    since longer ones shared the link. The time of messages during DP.sync is subtracted from
    DP.sync, since the simulator sends both at the same time.

    Raises:
        PlanError: a stage of the plan was not recorded.
    """
    stages = range(plan.num_stages)
    seconds = _durations(measured)
    messages = [s.duration_s for r in measured.ranks for s in r if s.lane is Lane.P2P]
    p2p_s = quantiles(messages, n=10)[0] if len(messages) > 1 else 0.0
    sync = _grad_sync(measured, p2p_s)

    def typical(op: Op, of_stages: Collection[int]) -> tuple[float, ...]:
        for stage in of_stages:
            if (stage, op) not in seconds:
                raise PlanError(f"no {op} of stage {stage} in the trace; trace whole iterations")
        return tuple(median(seconds[stage, op]) if stage in of_stages else 0.0 for stage in stages)

    def optional(op: Op) -> tuple[float, ...]:
        return typical(op, [stage for stage in stages if (stage, op) in seconds])

    split = sorted(set().union(*map(split_stages, plan.programs)))
    weight_s = typical(Op.WEIGHT, split)
    early = frozenset().union(*map(recomputed, plan.programs))
    recompute_s = typical(Op.RECOMPUTE, {stage for stage, _ in early})
    return Costs(
        forward_s=typical(Op.FORWARD, stages),
        backward_s=tuple(
            map(sum, zip(typical(Op.BACKWARD, stages), weight_s, recompute_s, strict=True))
        ),
        weight_s=weight_s,
        recompute_s=recompute_s,
        p2p_s=p2p_s,
        grad_sync_s=tuple(min(sync.get((stage, False), [0.0])) for stage in stages),
        param_gather_s=tuple(min(sync.get((stage, True), [0.0])) for stage in stages),
        offload_s=optional(Op.OFFLOAD),
        reload_s=optional(Op.RELOAD),
        optimizer_s=optional(Op.STEP),
    )


def replay(
    plan: Plan, costs: Costs, iterations: int, *, sends_waited_for: frozenset[Op] = frozenset()
) -> Timeline:
    """Return a simulation of this number of iterations.

    A plan with carried DP.sync is simulated until it is steady, and its last iterations are
    returned.

    Args:
        sends_waited_for: see `Link`; only for a plan whose DP.sync ends with the iteration.
    """
    link = Link(preemptive=False)
    if plan.flushes:
        link = replace(link, sends_waited_for=sends_waited_for)
        return simulate(plan, costs, link, iterations=iterations)
    steady = steady_state(plan, costs, replace(link, grad_sync_order="edf"))
    ends_s = steady.iteration_ends_s(0)
    first = len(ends_s) - iterations
    return _iterations_from(steady, max(0, first))


def _iterations_from(timeline: Timeline, first: int) -> Timeline:
    """Return the iterations from ``first`` on, with numbers and times that begin at zero."""
    kept = Timeline.of(
        (span._replace(iteration=span.iteration - first) for span in spans)
        for spans in ((s for s in rank if s.iteration >= first) for rank in timeline.ranks)
    )
    zero_s = min(s.start_s for spans in kept.ranks for s in spans if s.lane in BUSY_LANES)
    return kept.between(zero_s, inf)


def _overlaps(measured: Timeline) -> bool:
    """Return True if DP.sync of an iteration began before a rank's last computation in it."""
    for spans in measured.ranks:
        last_s: dict[int, float] = defaultdict(float)
        for span in spans:
            if span.lane is Lane.COMPUTE:
                last_s[span.iteration] = max(last_s[span.iteration], span.start_s)
        if any(s.lane is Lane.GRAD_SYNC and s.start_s < last_s[s.iteration] for s in spans):
            return True
    return False


def _durations(measured: Timeline) -> Mapping[tuple[int, Op], list[float]]:
    """Return the seconds of each stage's computations, copies and steps, without interruptions.

    A step without a stage counts in equal parts for all of the rank's stages.
    """
    found: dict[tuple[int, Op], dict[object, float]] = defaultdict(lambda: defaultdict(float))
    num_stages = measured.num_ranks * measured.num_segments
    for rank, spans in enumerate(measured.ranks):
        steps = [Action(stage, Op.STEP) for stage in range(rank, num_stages, measured.num_ranks)]
        for span in spans:
            actions = [span.action] if span.action is not None else []
            if span.lane is Lane.OPTIMIZER:
                actions = actions or steps
            elif span.lane not in (Lane.COMPUTE, Lane.COPY):
                continue
            for stage, op, microbatch in actions:
                found[stage, op][microbatch, span.iteration] += span.duration_s / len(actions)
    durations = {key: list(seconds.values()) for key, seconds in found.items()}
    for stage, op in [*durations]:
        if op is Op.WEIGHT_PART:  # all parts are the work of all micro-batches
            parts = durations.pop((stage, op))
            count = len(durations[stage, Op.FORWARD])
            durations[stage, Op.WEIGHT] = [sum(parts) / count]
    return durations


def _grad_sync(measured: Timeline, p2p_s: float) -> Mapping[tuple[int, bool], list[float]]:
    """Return the link seconds of each (stage, is a gather), per iteration.

    The parts of a stage are added up, in iterations that have all parts. DP.sync that overlapped is
    taken to have run one after the other, in the order of the ends.
    """
    totals: dict[tuple[int, bool], dict[int, dict[Action, float]]] = {}
    for spans in measured.ranks:
        syncs = queued(span for span in spans if span.lane is Lane.GRAD_SYNC)
        own = _own_share(spans, syncs, p2p_s)
        for span in syncs:
            if span.action is not None:
                key = span.action.stage, span.action.op in GATHER_OPS
                parts = totals.setdefault(key, {}).setdefault(span.iteration, {})
                parts[span.action] = parts.get(span.action, 0.0) + own * span.duration_s
    found: dict[tuple[int, bool], list[float]] = {}
    for key, by_iteration in totals.items():
        most = max(map(len, by_iteration.values()))
        found[key] = [sum(p.values()) for p in by_iteration.values() if len(p) == most]
    return found


def _own_share(spans: Sequence[Span], syncs: Sequence[Span], p2p_s: float) -> float:
    """Return the share of a rank's link that DP.sync had while it ran; messages took the rest.

    DP.sync has at least half, since the link is shared fairly. No two of ``syncs`` overlap.
    """
    sync_s = sum(sync.duration_s for sync in syncs)
    messages_s = 0.0
    for message in (span for span in spans if span.lane is Lane.P2P and span.duration_s > 0):
        beside_s = sum(
            max(0.0, min(message.end_s, sync.end_s) - max(message.start_s, sync.start_s))
            for sync in syncs
        )
        messages_s += min(message.duration_s, p2p_s) * beside_s / message.duration_s
    return max(0.5, 1 - messages_s / sync_s) if sync_s else 1.0
