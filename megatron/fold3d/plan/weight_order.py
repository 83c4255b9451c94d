"""The verifier's checks of delayed weight gradients; other plans do not load this module."""

from collections import defaultdict, deque

from megatron.fold3d.plan.ir import Action, Op, Plan, error_at
from megatron.fold3d.plan.ops import SUM_OPS


def check_weight_grads(plan: Plan) -> None:
    """Check that weight gradients follow the backwards, and that no part of DP.sync divides them.

    Raises:
        PlanError: a rule is broken; the message marks the first such action in the plan.
    """
    for rank, program in enumerate(plan.programs):
        computed = set()
        sliced: dict[int, Action] = {}  # by stage, the last part
        for index, (stage, op, microbatch) in enumerate(program):
            if op is Op.BACKWARD:
                computed.add((stage, microbatch))
                sliced.pop(stage, None)
            elif op in SUM_OPS and microbatch is not None:
                sliced[stage] = program[index]
            elif op is Op.WEIGHT and stage in sliced:
                part = Action(stage, Op.WEIGHT_PART, sliced[stage].microbatch)
                text = (
                    f"{sliced[stage]} comes before {program[index]}; write weight gradients that "
                    f"DP.sync divides as {part}, up to where each part ends"
                )
                raise error_at(plan, {rank: index}, text)
            elif op is Op.WEIGHT and (stage, microbatch) not in computed:
                backward = Action(stage, Op.BACKWARD, microbatch)
                text = f"{program[index]} comes before {backward}, which leaves what it reads"
                raise error_at(plan, {rank: index}, text)


def check_oldest_first(plan: Plan) -> None:
    """Check that a stage's weight gradients follow the order of its backwards.

    Transformer Engine keeps operands in a first-in first-out queue.

    Raises:
        PlanError: one does not; the message marks the first one in the plan.
    """
    for rank, program in enumerate(plan.programs):
        kept: dict[int, deque[int | None]] = defaultdict(deque)
        for index, (stage, op, microbatch) in enumerate(program):
            if op is Op.BACKWARD:
                kept[stage].append(microbatch)
            elif op is Op.WEIGHT and (oldest := kept[stage].popleft()) != microbatch:
                text = (
                    f"{program[index]} comes before {Action(stage, Op.WEIGHT, oldest)}, whose "
                    "backward is older: Transformer Engine computes the oldest weight gradient "
                    "first; write them in the order of the backwards, or give --transformer-impl "
                    "local"
                )
                raise error_at(plan, {rank: index}, text)
