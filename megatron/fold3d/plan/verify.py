"""Prove that a plan can run, or show the action that stops it.

`verify` runs the plan under the strictest rules for transfers: a send blocks its rank until the
matching receive is posted, and two neighbours have one ordered channel per direction. A plan that
completes under these rules completes under any looser ones, with any timing.
"""

from collections import Counter, defaultdict
from collections.abc import Container, Mapping, Sequence
from itertools import count, pairwise

from megatron.fold3d.plan.ir import (
    FREE_OPS,
    STAGE_OPS,
    WHOLE,
    Action,
    Op,
    Plan,
    PlanError,
    Program,
    gc_paused,
)
from megatron.fold3d.plan.passes.early_grad_sync import early_stages, num_needed
from megatron.fold3d.plan.passes.grad_sync import carried_over, deferred_stages, slices_of
from megatron.fold3d.plan.passes.recompute import recomputed
from megatron.fold3d.plan.passes.transfers import add_p2p
from megatron.fold3d.plan.passes.weight_grads import split_stages

_COLUMNS = 4  # actions shown on either side of a marked one
_ROWS = 8  # ranks shown at most

_STAGE_PAIRS = ({Op.REDUCE_GRAD, Op.WAIT_GRAD}, {Op.GATHER_PARAM, Op.WAIT_PARAM})
_GATHERED_AGAIN = (Op.FREE_PARAM, Op.GATHER_PARAM_B, Op.WAIT_PARAM_B)
_Need = tuple[int, Op, int | None]
_CHANNELS = ((Op.SEND_F, Op.RECV_F, 1), (Op.SEND_B, Op.RECV_B, -1))


@gc_paused()
def verify(plan: Plan) -> None:
    """Check that the plan runs every micro-batch once, in order, and cannot deadlock.

    If a plan has no transfers, those that `add_p2p` adds are checked.

    Raises:
        PlanError: the plan is wrong; the message shows its grid with the wrong action marked.
    """
    _check_actions(plan)
    if plan.has(Op.WEIGHT):
        from megatron.fold3d.plan.weight_order import check_weight_grads

        check_weight_grads(plan)
    _check_slices(plan)
    if plan.num_ranks > 1 and not plan.has_p2p:
        plan = add_p2p(plan)
    _check_channels(plan)
    _check_progress(plan)


def _check_actions(plan: Plan) -> None:
    """Check that each rank holds the actions of its own stages, each exactly once."""
    found: dict[tuple[int, Op], list[int | None]] = defaultdict(list)
    for rank, program in enumerate(plan.programs):
        for index, (stage, op, microbatch) in enumerate(program):
            if stage % plan.num_ranks != rank:
                owner = stage % plan.num_ranks
                raise error_at(plan, {rank: index}, f"stage {stage} belongs to rank {owner}")
            found[stage, op].append(microbatch)
    for (stage, op), microbatches in found.items():
        if len(set(microbatches)) < len(microbatches):
            twice = Action(stage, op, Counter(microbatches).most_common(1)[0][0])
            raise error_at(plan, _cell(plan, twice), f"{twice} appears more than once")

    ops = {op for _, op in found}
    for stage in range(plan.num_stages):
        split = {Op.WEIGHT} if found[stage, Op.WEIGHT] else set()
        for op in {Op.FORWARD} | ops & {Op.BACKWARD} | split:
            if len(found[stage, op]) < plan.num_microbatches:
                present = set(found[stage, op])
                lacking = Action(stage, op, next(m for m in count() if m not in present))
                raise PlanError(f"{lacking} is missing; a stage runs each micro-batch once")
        started = ops | ({Op.REDUCE_GRAD} if Op.REDUCE_SLICE in ops else set())
        for op in STAGE_OPS & set().union(*(pair for pair in _STAGE_PAIRS if started & pair)):
            if not found[stage, op]:
                raise PlanError(f"{Action(stage, op)} is missing; what starts must be waited for")
        again = [op for op in _GATHERED_AGAIN if found[stage, op]]
        if again and (lacking_op := next((op for op in _GATHERED_AGAIN if op not in again), None)):
            raise PlanError(
                f"{Action(stage, lacking_op)} is missing beside {Action(stage, again[0])}; "
                "parameters that are freed behind a forward are gathered again for the backward"
            )
        forwards = found[stage, Op.FORWARD]
        if (early := next((i for i, m in enumerate(forwards) if m != i), None)) is not None:
            late = Action(stage, Op.FORWARD, early)
            text = f"{late} comes too late; a stage reads its data in the order of micro-batches"
            raise error_at(plan, _cell(plan, late), text)


def _check_slices(plan: Plan) -> None:
    """Check that the slices of a stage's DP.sync run in order, and REDUCE_GRAD last."""
    if not plan.has(Op.REDUCE_SLICE):
        return
    for program in plan.programs:
        for slices in slices_of(program).values():
            if slices[0].microbatch == 0:
                text = f"{slices[0]} is empty; a slice ends behind where it begins"
                raise error_at(plan, _cell(plan, slices[0]), text)
            for earlier, later in pairwise(slices):
                if earlier.op is Op.REDUCE_GRAD:
                    text = f"{later} comes after {earlier}, which starts all that is left"
                elif later.op is Op.REDUCE_SLICE and later[2:] <= earlier[2:]:
                    text = f"{later} comes after {earlier}; a slice begins where the last one ends"
                else:
                    continue
                raise error_at(plan, _cell(plan, later), text)


def _check_channels(plan: Plan) -> None:
    """Check that two ranks receive in the order in which they send, in each direction."""
    for rank, program in enumerate(plan.programs):
        for send_op, receive_op, step in _CHANNELS:
            to = (rank + step) % plan.num_ranks
            sends = [action for action in program if action.op is send_op]
            receives = [action for action in plan.programs[to] if action.op is receive_op]
            arriving = [(stage + step, receive_op, m) for stage, _, m in sends]
            if arriving == receives:
                continue
            pairs = list(zip(arriving, receives, strict=False))
            first = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
            if arriving[first:] and arriving[first] not in receives:
                text = f"{sends[first]} has no {Action(*arriving[first])} to go with it"
                raise error_at(plan, _cell(plan, sends[first]), text)
            receive = receives[first]
            send = Action(receive.stage - step, send_op, receive.microbatch)
            if send not in sends:
                text = f"{receive} has no {send} to go with it"
                raise error_at(plan, _cell(plan, receive), text)
            text = f"{sends[first]} meets {receive}; what is sent first must be received first"
            raise error_at(plan, _cell(plan, sends[first]) | _cell(plan, receive), text)


def _check_progress(plan: Plan) -> None:
    """Check for deadlocks: the whole plan has an order in which each action follows its needs."""
    needs = _Needs(plan)
    position = [0] * plan.num_ranks
    blocked: dict[_Need, list[int]] = defaultdict(list)
    runnable = list(range(plan.num_ranks))
    while runnable:
        rank = runnable.pop()
        program, index = plan.programs[rank], position[rank]
        while index < len(program):
            action = program[index]
            if (need := needs.first_unmet(action)) is not None:
                blocked[need].append(rank)
                break
            needs.done.add(action)
            index += 1
            if action in blocked:
                runnable.extend(blocked.pop(action))
        position[rank] = index
    if blocked:
        raise _deadlock(plan, position, blocked)


class _Needs:
    """The actions of any rank that must precede an action, and the actions that have run.

    Needs are plain tuples: they compare equal to actions and are four times faster to make.
    """

    def __init__(self, plan: Plan) -> None:
        ops = {op for program in plan.programs for _, op, _ in program}
        alone = plan.num_ranks == 1  # a single rank hands its tensors to itself
        sent_forward, sent_back = (Op.FORWARD, Op.BACKWARD) if alone else (Op.SEND_F, Op.SEND_B)
        # By op: the ops that it needs, of the same micro-batch, this many stages away.
        self.rules: dict[Op, tuple[tuple[int, Op], ...]] = {
            Op.FORWARD: ((-1, sent_forward),),
            Op.BACKWARD: ((0, Op.FORWARD), (1, sent_back)),
            Op.RECOMPUTE: ((0, Op.FORWARD),),
            Op.WEIGHT: ((0, Op.BACKWARD),),
            Op.SEND_F: ((0, Op.FORWARD), (1, Op.RECV_F)),
            Op.SEND_B: ((0, Op.BACKWARD), (-1, Op.RECV_B)),
            Op.RECV_F: (),  # posting waits for nothing
            Op.RECV_B: (),
            Op.REDUCE_GRAD: (),
            Op.REDUCE_SLICE: (),
            Op.WAIT_GRAD: ((0, Op.REDUCE_GRAD),),
            Op.GATHER_PARAM: (),
            Op.WAIT_PARAM: ((0, Op.GATHER_PARAM),),
            Op.FREE_PARAM: ((0, Op.WAIT_PARAM),),
            Op.GATHER_PARAM_B: ((0, Op.FREE_PARAM),),
            Op.WAIT_PARAM_B: ((0, Op.GATHER_PARAM_B),),
            Op.FREE_PARAM_B: ((0, Op.WAIT_PARAM),),
            Op.FREE_GRAD: ((0, Op.WAIT_GRAD),),
            Op.OFFLOAD: ((0, Op.FORWARD),),
            Op.RELOAD: ((0, Op.OFFLOAD),),
        }
        microbatches, stages = range(plan.num_microbatches), range(plan.num_stages)
        # Data and loss are there from the start, as if sent by stages beyond either end.
        self.done: set[_Need] = {(-1, sent_forward, m) for m in microbatches}
        self.done |= {(plan.num_stages, sent_back, m) for m in microbatches}
        # So are the reductions that the iteration before has started.
        deferred = frozenset().union(*map(deferred_stages, plan.programs))
        self.done |= {(stage, Op.REDUCE_GRAD, None) for stage in deferred}

        self.others: dict[_Need, list[_Need]] = {}  # what the rules cannot say
        split = frozenset().union(*map(split_stages, plan.programs))
        for stage in stages if Op.REDUCE_GRAD in ops else ():
            gradient = Op.WEIGHT if stage in split else Op.BACKWARD
            whole: list[_Need] = [(stage, gradient, m) for m in microbatches]
            self.others[stage, Op.REDUCE_GRAD, None] = whole
        for stage in deferred if Op.GATHER_PARAM in ops else ():
            # What is gathered has been stepped with the gradients of the iteration before.
            self.others[stage, Op.GATHER_PARAM, None] = [(stage, Op.WAIT_GRAD, None)]
        for program in plan.programs if Op.REDUCE_SLICE in ops else ():
            begun = carried_over(program)  # what the iteration before has left
            early = early_stages(program)
            for stage, slices in slices_of(program).items():
                whole = self.others.pop((stage, Op.REDUCE_GRAD, None))
                self.others |= dict.fromkeys((a for a in slices if a not in begun), whole)
                if stage in early:
                    self._add_early(program, stage, slices)
        for stage in stages if Op.WAIT_PARAM in ops else ():
            self.others[stage, Op.FORWARD, 0] = [(stage, Op.WAIT_PARAM, None)]
        for program in plan.programs if Op.RECOMPUTE in ops else ():
            for stage, m in recomputed(program):
                self.others[stage, Op.BACKWARD, m] = [(stage, Op.RECOMPUTE, m)]
        for program in plan.programs if Op.OFFLOAD in ops else ():
            for stage, _, m in (action for action in program if action.op is Op.OFFLOAD):
                again = Op.RECOMPUTE if (stage, Op.BACKWARD, m) in self.others else Op.BACKWARD
                self.others[stage, again, m] = [(stage, Op.RELOAD, m)]
        for program in plan.programs if ops & FREE_OPS else ():
            self._add_frees(program)
        for program in plan.programs if Op.FREE_GRAD in ops else ():
            self._add_freed_grads(program, deferred)

    def _add_early(self, program: Program, stage: int, slices: Sequence[Action]) -> None:
        """Require that a slice follows as much of the stage's weight gradients as it reduces."""
        weights = [a for a in program if a.op is Op.WEIGHT and a.stage == stage]
        self.others[weights[0]] = [a._replace(op=Op.BACKWARD) for a in weights]
        for action in slices:
            end = action.microbatch if action.op is Op.REDUCE_SLICE else WHOLE
            assert end is not None
            self.others[action] = [*weights[: num_needed(end, len(weights))]]

    def _add_frees(self, program: Program) -> None:
        """Require that parameters are whole when read, and freed only after their last use."""
        stages = [action.stage for action in program if action.op is Op.GATHER_PARAM_B]
        for action in program:
            stage, op, _ = action
            if op is Op.FORWARD:
                self.others.setdefault((stage, Op.FREE_PARAM, None), []).append(action)
            elif op is Op.BACKWARD or op is Op.RECOMPUTE:
                self.others.setdefault((stage, Op.FREE_PARAM_B, None), []).append(action)
                if stage in stages:
                    again = (stage, Op.WAIT_PARAM_B, None)
                    self.others.setdefault(action, []).append(again)

    def _add_freed_grads(self, program: Program, deferred: Container[int]) -> None:
        """Require that the last iteration's gradients are freed before new ones are added there."""
        freed = {a.stage for a in program if a.op is Op.FREE_GRAD and a.stage in deferred}
        for action in program:
            if action.op is Op.BACKWARD and action.stage in freed:
                free = (action.stage, Op.FREE_GRAD, None)
                self.others.setdefault(action, []).append(free)

    def first_unmet(self, action: Action) -> _Need | None:
        """Return the first need of an action that is not met yet, if there is one."""
        stage, op, microbatch = action
        for step, needed in self.rules[op]:
            need = (stage + step, needed, microbatch)
            if need not in self.done:
                return need
        if action in self.others:
            return next((need for need in self.others[action] if need not in self.done), None)
        return None


def _deadlock(plan: Plan, position: list[int], blocked: Mapping[_Need, list[int]]) -> PlanError:
    """Name the action that each stopped rank waits for; actions that no rank has come first."""
    waits = {rank: Action(*need) for need, ranks in blocked.items() for rank in ranks}
    for rank, need in waits.items():
        if need not in plan.programs[need.stage % plan.num_ranks]:
            text = f"{plan.programs[rank][position[rank]]} needs {need}, which is missing"
            return error_at(plan, {rank: position[rank]}, text)
    reasons = "; ".join(
        f"rank {rank} waits at {plan.programs[rank][position[rank]]} for {need}"
        for rank, need in sorted(waits.items())[:_ROWS]
    )
    return error_at(plan, {rank: position[rank] for rank in waits}, f"deadlock: {reasons}")


def _cell(plan: Plan, action: Action) -> dict[int, int]:
    """Return the action's last position, as {rank: index}."""
    rank = action.stage % plan.num_ranks
    program = plan.programs[rank]
    return {rank: len(program) - 1 - program[::-1].index(action)}


def error_at(plan: Plan, marked: Mapping[int, int], text: str) -> PlanError:
    """Add the grid below the message: a window of each rank's program, with marks as > <."""
    first, last = min(marked), max(marked)
    lines = [text]
    for rank in range(max(0, first - 1), min(plan.num_ranks, last + 2))[:_ROWS]:
        centre = marked.get(rank, marked[first])
        start = max(0, centre - _COLUMNS)
        cells = [
            f">{action}<" if marked.get(rank) == start + i else f" {action} "
            for i, action in enumerate(plan.programs[rank][start : centre + _COLUMNS + 1])
        ]
        lines.append(f"  rank {rank:>2} |" + "".join(f"{cell:<13}" for cell in cells).rstrip())
    return PlanError("\n".join(lines))
