"""The parts of a stage's DP.sync and of its weight gradients: their beginnings and order."""

from megatron.fold3d.plan.ir import WHOLE, Action, Plan, Program, carried, cell_of, error_at
from megatron.fold3d.plan.ops import PART_OPS, SUM_OPS


def part_begins(program: Program) -> dict[Action, int]:
    """Return the beginning of each part in thousandths; parts follow the loops of their stages."""
    steps = carried(program)
    parts = [(index, action) for index, action in enumerate(program) if action[1] in PART_OPS]
    parts.sort(key=lambda part: part[0] < steps.get(part[1].stage, 0))  # stable
    ends: dict[tuple[int, bool], int] = {}
    begins: dict[Action, int] = {}
    for _, action in parts:
        key = action.stage, action.op in SUM_OPS
        begins[action] = ends.get(key, 0)
        ends[key] = action.end
    return begins


def check_parts(plan: Plan) -> None:
    """Check that the parts of a stage's weight gradients, and of its DP.sync, run in order.

    Raises:
        PlanError: parts are out of order; the message marks the first of them in the plan.
    """
    for program in plan.programs:
        last: dict[tuple[int, bool], Action] = {}
        for action, begin in part_begins(program).items():
            key = action.stage, action.op in SUM_OPS
            if action.end > begin:
                last[key] = action
                continue
            if begin == 0:
                text = f"{action} is empty; a part ends behind where it begins"
            elif begin == WHOLE:
                text = f"{action} comes after {last[key]}, which ends with all that is left"
            else:
                text = f"{action} comes after {last[key]}; a part begins where the last one ends"
            raise error_at(plan, cell_of(plan, action), text)
        for part in last.values():
            if part.end != WHOLE:
                what = "the sums of a stage" if part.op in SUM_OPS else "weight gradients"
                text = f"{part} is the last part; {what} end at {WHOLE}"
                raise error_at(plan, cell_of(plan, part), text)
