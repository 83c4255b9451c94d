"""Passes from plan to plan: each adds one kind of action to a compute plan and moves nothing else.

compute plan ──> delay_weight_grads, add_offload ──> add_p2p ──> add_grad_sync ──>
defer_grad_sync ──> what runs
"""

from collections import defaultdict
from collections.abc import Container, Iterator, Sequence

from megatron.fold3d.plan.ir import (
    COMPUTE_OPS,
    P2P_OPS,
    Action,
    Op,
    Plan,
    PlanError,
    Program,
    gc_paused,
)

_BACKWARD_ENDS = frozenset({Op.BACKWARD, Op.WEIGHT, Op.SEND_B})


def lower(plan: Plan) -> Plan:
    """Return the plan that runs: with the transfers and the gradient sync that it still lacks.

    Raises:
        PlanError: the compute order cannot run.
    """
    if plan.num_ranks > 1 and not plan.has_p2p:
        plan = add_p2p(plan)
    reduces = any(action.op is Op.REDUCE_GRAD for program in plan.programs for action in program)
    return plan if reduces else add_grad_sync(plan)


def forward_only(plan: Plan) -> Plan:
    """Return the forwards of a plan: what evaluation runs."""
    return plan.select({Op.FORWARD})


@gc_paused()
def add_p2p(plan: Plan) -> Plan:
    """Add the transfers between stages: paper Algorithm 2, ``PPComm``.

    The pass plays the plan in rounds, one computation per rank and round. A computation is
    followed by the send of its result; the matching receive is posted before the computation
    that its rank last started by then, so that it is open while the result is still being
    computed. Sends and receives appear in one order that all ranks can follow even if each send
    blocks until its receive is posted: no plan that this pass returns can deadlock. Whatever else
    stands behind a computation stays there, behind its send.

    Raises:
        PlanError: the compute order itself cannot run.
    """
    num_ranks, num_stages = plan.num_ranks, plan.num_stages
    programs = [[a for a in program if a.op not in P2P_OPS] for program in plan.programs]
    results = _Results(plan)
    lowered: list[list[Action]] = [[] for _ in programs]
    last_compute = [0] * num_ranks  # where in `lowered` each rank's last computation stands
    position = [0] * num_ranks

    def take_over(rank: int) -> None:
        """Copy what stands before the rank's next computation."""
        program, index = programs[rank], position[rank]
        while index < len(program) and program[index].op not in COMPUTE_OPS:
            lowered[rank].append(program[index])
            index += 1
        position[rank] = index

    for rank in range(num_ranks):
        take_over(rank)
    running = [rank for rank in range(num_ranks) if position[rank] < len(programs[rank])]
    while running:
        ready = [
            (rank, action)
            for rank in running
            if results.allow(action := programs[rank][position[rank]])
        ]
        if not ready:
            raise PlanError(_stuck({rank: programs[rank][position[rank]] for rank in running}))
        for rank, action in ready:
            position[rank] += 1
            last_compute[rank] = len(lowered[rank])
            lowered[rank].append(action)
            results.add(action)
        for rank, (stage, op, microbatch) in ready:
            if op is Op.FORWARD and stage + 1 < num_stages:
                peer, send, receive = stage + 1, Op.SEND_F, Op.RECV_F
            elif op is Op.BACKWARD and stage > 0:
                peer, send, receive = stage - 1, Op.SEND_B, Op.RECV_B
            else:
                continue
            to = peer % num_ranks
            if to != rank:  # one rank alone hands its tensors to itself
                lowered[rank].append(Action(stage, send, microbatch))
                lowered[to].insert(last_compute[to], Action(peer, receive, microbatch))
                last_compute[to] += 1
        for rank, _ in ready:
            take_over(rank)
        running = [rank for rank in running if position[rank] < len(programs[rank])]
    return Plan(tuple(map(tuple, lowered)))


def add_grad_sync(plan: Plan) -> Plan:
    """Add DP.sync: start a stage's reduction with its last backward, wait after the last action.

    ``REDUCE_GRAD`` follows the stage's last backward and its send: PP.sync goes first. Gradients
    that become ready inside that backward may start to travel inside it (paper Algorithm 2,
    lines 4-10).
    """
    return Plan(tuple(map(_with_grad_sync, plan.programs)))


def defer_grad_sync(plan: Plan, stages: Container[int]) -> Plan:
    """Let DP.sync of ``stages`` reach into the next iteration: paper Algorithm 2, the free split.

    Their ``WAIT_GRAD`` stands right before their first forward, behind its receive, and ends what
    ``REDUCE_GRAD`` of the iteration before has started.
    """
    return Plan(tuple(_with_deferred_wait(program, stages) for program in plan.programs))


def deferred_stages(program: Program) -> frozenset[int]:
    """Return the stages whose gradients are waited for before their first forward."""
    begun: set[int] = set()
    deferred: set[int] = set()
    for stage, op, _ in program:
        if op is Op.FORWARD:
            begun.add(stage)
        elif op is Op.WAIT_GRAD and stage not in begun:
            deferred.add(stage)
    return frozenset(deferred)


def delay_weight_grads(plan: Plan, segments: Sequence[int]) -> Plan:
    """Compute the weight gradients of some segments when all backwards of a rank are through.

    The next forward needs the first segment's gradients first, and its backward is the last to
    end: its DP.sync has nothing to hide behind but these weight gradients, which no other
    computation waits for. The split of a backward in two is that of Zero Bubble (Qi et al., 2023).

    Args:
        plan: without DP.sync; what else stands behind the last backward stays in front.
        segments: whose `BACKWARD` becomes one of activations alone, with a `WEIGHT` to follow.

    Raises:
        PlanError: a segment is not one of the plan's.
    """
    if unknown := [segment for segment in segments if not 0 <= segment < plan.num_segments]:
        raise PlanError(
            f"no segment {unknown[0]} whose weight gradients could be delayed; the plan has "
            f"segments 0 to {plan.num_segments - 1}"
        )
    delayed = [
        Action(segment * plan.num_ranks, Op.WEIGHT, microbatch)
        for segment in sorted(segments)
        for microbatch in range(plan.num_microbatches)
    ]
    return Plan(
        tuple(
            (*program, *(action._replace(stage=action.stage + rank) for action in delayed))
            for rank, program in enumerate(plan.programs)
        )
    )


def split_stages(program: Program) -> frozenset[int]:
    """Return the stages whose weight gradients are computed apart from their backwards."""
    return frozenset(stage for stage, op, _ in program if op is Op.WEIGHT)


def add_offload(plan: Plan, *, depth: int = 1, at_most: int | None = None) -> Plan:
    """Add the saved activations' way to host memory and back (paper Sec. IV, offloader).

    A micro-batch leaves while the rank's next ``depth`` computations run and comes back while the
    ``depth`` before its own backward do. One that could not stay away for the time between stays.
    No other rank notices: ranks may offload differently.

    Args:
        plan: with or without transfers; an output is sent before its stage's activations leave.
        depth: more where a copy takes longer than one computation.
        at_most: how many of a rank leave; first of all those that are away for longest.
    """
    return Plan(tuple(_with_offload(program, depth, at_most) for program in plan.programs))


class _Results:
    """Which forwards and backwards have run, as one byte each: plans have a million of them."""

    def __init__(self, plan: Plan) -> None:
        self.num_microbatches = plan.num_microbatches
        self.last_stage = plan.num_stages - 1
        self.forward = bytearray(plan.num_stages * plan.num_microbatches)
        self.backward = bytearray(plan.num_stages * plan.num_microbatches)

    def add(self, action: Action) -> None:
        stage, op, microbatch = action
        if op is not Op.WEIGHT:
            done = self.forward if op is Op.FORWARD else self.backward
            done[stage * self.num_microbatches + (microbatch or 0)] = True

    def allow(self, action: Action) -> int:
        """Whether what the action reads is there."""
        stage, op, microbatch = action
        here = stage * self.num_microbatches + (microbatch or 0)
        if op is Op.FORWARD:
            return stage == 0 or self.forward[here - self.num_microbatches]
        if op is Op.WEIGHT:
            return self.backward[here]
        return self.forward[here] and (
            stage == self.last_stage or self.backward[here + self.num_microbatches]
        )


def _stuck(waiting: dict[int, Action]) -> str:
    where = ", ".join(f"rank {rank} at {action}" for rank, action in waiting.items())
    return f"no rank can go on: {where}; each needs a result that comes later or never"


def _with_grad_sync(program: Program) -> Program:
    lowered = list(program)
    last = {stage: i for i, (stage, op, _) in enumerate(program) if op in _BACKWARD_ENDS}
    in_order = sorted(last, key=last.__getitem__)
    for stage in reversed(in_order):
        lowered.insert(last[stage] + 1, Action(stage, Op.REDUCE_GRAD))
    return (*lowered, *(Action(stage, Op.WAIT_GRAD) for stage in in_order))


def _with_deferred_wait(program: Program, stages: Container[int]) -> Program:
    waits = {action for action in program if action.op is Op.WAIT_GRAD and action.stage in stages}

    def lower() -> Iterator[Action]:
        moved = set(waits)
        for action in program:
            if action.op is Op.FORWARD and (wait := Action(action.stage, Op.WAIT_GRAD)) in moved:
                moved.remove(wait)
                yield wait
            if action not in waits:
                yield action

    return tuple(lower())


def _with_offload(program: Program, depth: int, at_most: int | None) -> Program:
    compute = [action for action in program if action.op in COMPUTE_OPS]
    travels = _travels(compute, depth, at_most)
    reloads = {  # by the computation during which they come back
        compute[index - depth]: Action(stage, Op.RELOAD, microbatch)
        for index, (stage, op, microbatch) in enumerate(compute)
        if op is Op.BACKWARD and (stage, microbatch) in travels
    }

    def lower() -> Iterator[Action]:
        leaving = None
        for action in program:
            if leaving and action != (leaving.stage, Op.SEND_F, leaving.microbatch):
                yield leaving
                leaving = None
            if action in reloads:
                yield reloads[action]
            yield action
            if leaving:
                yield leaving
                leaving = None
            elif action.op is Op.FORWARD and (action.stage, action.microbatch) in travels:
                leaving = Action(action.stage, Op.OFFLOAD, action.microbatch)

    return tuple(lower())


def _travels(
    compute: Sequence[Action], depth: int, at_most: int | None
) -> set[tuple[int, int | None]]:
    """Choose the (stage, micro-batch) activations that leave the device."""
    forwards = {(a.stage, a.microbatch): i for i, a in enumerate(compute) if a.op is Op.FORWARD}
    alike: dict[int, list[tuple[int, int | None]]] = defaultdict(list)  # by how long they wait
    for index, (stage, op, microbatch) in enumerate(compute):
        if op is Op.BACKWARD:
            away = index - forwards[stage, microbatch]
            if away > 2 * depth:
                alike[away].append((stage, microbatch))
    left = len(forwards) if at_most is None else at_most
    chosen: set[tuple[int, int | None]] = set()
    for away in sorted(alike, reverse=True):
        candidates = alike[away]
        take = min(left, len(candidates))
        # Evenly spread, so that copies have the time of several computations each.
        chosen |= {candidates[i * len(candidates) // take] for i in range(take)}
        left -= take
    return chosen
