"""A proof that a plan can run, or the action that stops it.

`verify` runs the plan under the strictest rules for transfers: a send blocks its rank until the
matching receive is posted, and two neighbours have one ordered channel per direction. A plan that
completes under these rules completes under any looser ones, with any timing.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import count, product

from megatron.fold3d.plan.ir import (
    MOST_SHOWN,
    Action,
    Op,
    Plan,
    PlanError,
    Program,
    carried,
    cell_of,
    error_at,
    gc_paused,
)
from megatron.fold3d.plan.ops import (
    FREE_OPS,
    P2P_OPS,
    PART_OPS,
    STAGE_OPS,
    SUM_OPS,
    TABLE,
    WAYS,
    Need,
    Which,
)
from megatron.fold3d.plan.passes.transfers import add_p2p

_GATHERED_AGAIN = (Op.FREE_PARAM, Op.ALL_GATHER_B)
_READ = (Op.REDUCE_KEPT, Op.FINALIZE)
_SYNC = SUM_OPS | {Op.STEP, Op.ALL_GATHER, *_READ}
_MAY_WRAP = SUM_OPS | {Op.STEP, Op.FREE_GRAD}  # ops that may belong to the previous iteration
_Need = tuple[int, Op, int | None]


@gc_paused()
def verify(plan: Plan) -> None:
    """Check that the plan runs every micro-batch once, in order, and cannot deadlock.

    If a plan has no transfers, `add_p2p` adds transfers before the check.

    Raises:
        PlanError: the plan is wrong; the message shows its grid with the wrong action marked.
    """
    found = _check_actions(plan)
    if plan.has(Op.WEIGHT):
        from megatron.fold3d.plan.weight_order import check_weight_grads

        check_weight_grads(plan)
    _check_sync(plan, found)
    if any(a.op in PART_OPS and a.microbatch is not None for p in plan.programs for a in p):
        from megatron.fold3d.plan.parts import check_parts

        check_parts(plan)
    if plan.num_ranks > 1 and not plan.has(*P2P_OPS):
        plan = add_p2p(plan)
    _check_channels(plan)
    _check_progress(plan)


def _check_actions(plan: Plan) -> AbstractSet[tuple[int, Op]]:
    """Check that each rank holds the actions of its own stages, each exactly once.

    Returns:
        The (stage, op) pairs that the plan has.
    """
    found: dict[tuple[int, Op], list[int | None]] = defaultdict(list)
    for rank, program in enumerate(plan.programs):
        for index, (stage, op, microbatch) in enumerate(program):
            if stage % plan.num_ranks != rank:
                from megatron.fold3d.plan.torch_tables import placement_error

                raise error_at(plan, {rank: index}, placement_error(plan, stage, rank))
            found[stage, op].append(microbatch)
    for (stage, op), microbatches in found.items():
        if len(set(microbatches)) < len(microbatches):
            twice = Action(stage, op, Counter(microbatches).most_common(1)[0][0])
            raise error_at(plan, cell_of(plan, twice), f"{twice} appears more than once")

    actions = frozenset(found)
    ops = {op for _, op in found}
    for stage in range(plan.num_stages):
        split = (Op.WEIGHT,) if found[stage, Op.WEIGHT] else ()
        for op in (Op.FORWARD, *ops & {Op.BACKWARD}, *split):
            if len(found[stage, op]) < plan.num_microbatches:
                present = set(found[stage, op])
                lacking = Action(stage, op, next(m for m in count() if m not in present))
                raise PlanError(f"{lacking} is missing; a stage runs each micro-batch once")
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
            raise error_at(plan, cell_of(plan, late), text)
    return actions


def _check_sync(plan: Plan, found: AbstractSet[tuple[int, Op]]) -> None:
    """Check that each stage has the sums that its step needs, and that sums fit all-gathers."""
    ops = {op for _, op in found} & _SYNC
    late = [carried(program) for program in plan.programs if ops]
    for stage in range(plan.num_stages) if ops else ():
        actions = {op: Action(stage, op) for op in _SYNC | FREE_OPS if (stage, op) in found}
        summed, scattered = Op.ALL_REDUCE in actions, Op.REDUCE_SCATTER in actions
        if not (summed or scattered):
            lacking = Action(stage, Op.REDUCE_SCATTER if Op.ALL_GATHER in ops else Op.ALL_REDUCE)
            raise PlanError(f"{lacking} is missing; what is stepped is summed over the replicas")
        if Op.STEP not in actions:
            raise PlanError(f"{Action(stage, Op.STEP)} is missing; what is summed is stepped")
        is_late = stage in late[stage % plan.num_ranks]
        wrong, text = None, ""
        if summed and scattered:
            program = plan.programs[stage % plan.num_ranks]  # marks the last part of the sum
            wrong = next(a for a in reversed(program) if a[:2] == (stage, Op.REDUCE_SCATTER))
            text = f"{wrong} beside {stage}ALL_REDUCE: a stage is summed in one way"
        elif summed and (wrong := actions.get(Op.ALL_GATHER)):
            text = f"{wrong} of a stage that is all-reduced: every replica has stepped all of it"
        elif scattered and Op.ALL_GATHER in ops - actions.keys():
            text = f"{Action(stage, Op.ALL_GATHER)} is missing; replicas step shards of the stage"
            raise PlanError(text)
        elif is_late and (unread := next((op for op in _READ if op not in actions), None)):
            wrong = actions[Op.STEP]
            text = (
                f"{Action(stage, unread)} is missing beside {wrong}, which ends DP.sync of the "
                "iteration before; what Megatron reads at the end of an iteration is summed "
                f"there: write {stage}REDUCE_KEPT behind the backwards of the stage, and "
                f"{stage}FINALIZE behind those of the rank"
            )
        elif not is_late and (read := next((op for op in _READ if op in actions), None)):
            wrong = actions[read]
            text = f"{wrong} of a stage whose step is at the end, where all sums have ended"
        elif not is_late and (freed := actions.get(Op.FREE_PARAM_B)):
            program = plan.programs[stage % plan.num_ranks]
            if program.index(freed) > program.index(actions[Op.STEP]):
                wrong = freed
                text = f"{wrong} comes after {stage}STEP, with which the loop of the stage ends"
        if wrong:
            raise error_at(plan, cell_of(plan, wrong), text)


def _check_channels(plan: Plan) -> None:
    """Check that two ranks receive in the order in which they send, in each direction."""
    for rank, program in enumerate(plan.programs):
        for _, send_op, receive_op, step in WAYS:
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
                raise error_at(plan, cell_of(plan, sends[first]), text)
            receive = receives[first]
            send = Action(receive.stage - step, send_op, receive.microbatch)
            if send not in sends:
                text = f"{receive} has no {send} to go with it"
                raise error_at(plan, cell_of(plan, receive), text)
            text = f"{sends[first]} meets {receive}; what is sent first must be received first"
            raise error_at(plan, cell_of(plan, sends[first]) | cell_of(plan, receive), text)


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

    These are the needs in the table of ops, and the needs that follow from a carried STEP.
    Needs are plain tuples: they compare equal to actions and are four times faster to make.
    """

    def __init__(self, plan: Plan) -> None:
        ops = {op for program in plan.programs for _, op, _ in program}
        # A single rank hands its tensors to itself.
        sent = {way.compute: way.compute if plan.num_ranks == 1 else way.send for way in WAYS}
        # By op: the distance in stages to a needed action with the same number, and its op.
        self.rules: dict[Op, tuple[tuple[int, Op], ...]] = dict.fromkeys(ops, ())
        # By op: if the plan has the first op beside an action, the action needs the second.
        self.conditional: dict[Op, tuple[tuple[Op, Op], ...]] = dict.fromkeys(ops, ())
        self.others: dict[_Need, list[_Need]] = {}  # by action, all other needs
        every: dict[Op, list[Need]] = defaultdict(list)
        for op in ops:
            for need in TABLE[op].needs:
                if need.which is Which.INPUT:
                    self.rules[op] += ((need.step, sent[need.op]),)
                elif need.beside is not None and need.beside not in ops:
                    continue
                elif need.which is not Which.SAME:
                    every[op].append(need)
                elif need.beside is None:
                    self.rules[op] += ((need.step, need.op),)
                else:
                    self.conditional[op] += ((need.beside, need.op),)
        besides = {beside for found in self.conditional.values() for beside, _ in found}
        self.beside = {
            a for program in plan.programs if besides for a in program if a.op in besides
        }
        # Data and loss are ready from the start, as if sent by stages beyond both ends.
        ends = ((-1, sent[Op.FORWARD]), (plan.num_stages, sent[Op.BACKWARD]))
        self.done: set[_Need] = {(*end, m) for end in ends for m in range(plan.num_microbatches)}
        for program in plan.programs:
            steps = carried(program)
            self._add_every(program, every, steps)
            self._add_carried(program, steps, ops)

    def _add_every(
        self, program: Program, needs: Mapping[Op, Sequence[Need]], steps: Mapping[int, int]
    ) -> None:
        """Add the needs for all actions of an op in the same stage, or for parts up to an end.

        An op of `_MAY_WRAP` before a carried STEP needs only actions that stand before it: later
        actions belong to the previous iteration.
        """
        concerned = needs.keys() | {need.op for found in needs.values() for need in found}
        places: dict[tuple[int, Op], list[int]] = defaultdict(list)
        for index, (stage, op, _) in enumerate(program if needs else ()):
            if op in concerned:
                places[stage, op].append(index)
        for (stage, op), indices in list(places.items()):
            for index, need in product(indices, needs.get(op, ())):
                found = places.get((stage, need.op), [])
                is_before = index <= steps.get(stage, -1)
                if is_before and op in _MAY_WRAP:
                    found = found[: bisect_left(found, index)]
                needed = [program[place] for place in found]
                if not (needed or is_before or need.beside):
                    needed = [Action(stage, need.op, None if need.op in PART_OPS else 0)]
                if need.which is Which.UP_TO:
                    ends = [part.end for part in needed]
                    needed = needed[: 1 + bisect_left(ends, program[index].end)]
                self.others.setdefault(program[index], []).extend(needed)

    def _add_carried(
        self, program: Program, steps: Mapping[int, int], ops: AbstractSet[Op]
    ) -> None:
        """Add the needs that follow from a carried STEP, and the actions of the last iteration."""
        for stage in steps:
            step = (stage, Op.STEP, None)
            self.done.add((stage, Op.FINALIZE, None))
            self.others[stage, Op.ALL_GATHER, None] = [step]
            self.others[stage, Op.FREE_GRAD, None] = [step]
        if Op.FREE_GRAD not in ops:
            return
        freed = {a.stage for a in program if a.op is Op.FREE_GRAD and a.stage in steps}
        for action in program:  # old gradients are freed before new ones are added
            if action.op is Op.BACKWARD and action.stage in freed:
                free = (action.stage, Op.FREE_GRAD, None)
                self.others.setdefault(action, []).append(free)

    def first_unmet(self, action: Action) -> _Need | None:
        """Return the first need of an action that has not run yet, if there is one."""
        stage, op, number = action
        for step, needed in self.rules[op]:
            need = (stage + step, needed, number)
            if need not in self.done:
                return need
        for beside, needed in self.conditional[op]:
            at = None if needed in STAGE_OPS else number
            if (stage, beside, at) in self.beside and (stage, needed, at) not in self.done:
                return stage, needed, at
        if action in self.others:
            return next((need for need in self.others[action] if need not in self.done), None)
        return None


def _deadlock(plan: Plan, position: list[int], blocked: Mapping[_Need, list[int]]) -> PlanError:
    """Return the error that names each stopped rank's need; a missing action is named first."""
    waits = {rank: Action(*need) for need, ranks in blocked.items() for rank in ranks}
    for rank, need in waits.items():
        if need not in plan.programs[need.stage % plan.num_ranks]:
            text = f"{plan.programs[rank][position[rank]]} needs {need}, which is missing"
            return error_at(plan, {rank: position[rank]}, text)
    reasons = "; ".join(
        f"rank {rank} waits at {plan.programs[rank][position[rank]]} for {need}"
        for rank, need in sorted(waits.items())[:MOST_SHOWN]
    )
    return error_at(plan, {rank: position[rank] for rank in waits}, f"deadlock: {reasons}")
