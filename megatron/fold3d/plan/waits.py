"""The actions on links that a rank waits for, by the needs in the table of ops.

All other needs hold by the order of a verified program. Messages are left out, since a plan's
transfers decide which action reads a message.
"""

from collections import defaultdict
from collections.abc import Iterator

from megatron.fold3d.plan.ir import Action, Op, Program
from megatron.fold3d.plan.ops import LINK_OPS, STAGE_OPS, TABLE, Need, Which

_RULES: dict[Op, tuple[Need, ...]] = {
    op: tuple(need for need in row.needs if need.op in LINK_OPS and need.which is not Which.INPUT)
    for op, row in TABLE.items()
}


class Waits:
    """The waits of the actions of one program.

    Attributes:
        rules: by op, the needs for actions on links; an op without such needs is missing.
    """

    def __init__(self, program: Program) -> None:
        ops = {op for _, op, _ in program} & LINK_OPS
        self.rules = {
            op: rule
            for op, needs in _RULES.items()
            if (rule := tuple(need for need in needs if need.op in ops))
        }
        self._places: dict[Action, int] = {}
        self._of_stage: defaultdict[tuple[int, Op], list[Action]] = defaultdict(list)
        for index, action in enumerate(program):
            if action.op in LINK_OPS:
                self._places[action] = index
                self._of_stage[action.stage, action.op].append(action)

    def at(self, index: int, action: Action) -> Iterator[tuple[Action, int]]:
        """Yield the actions that the action at an index waits for, and their iteration.

        The iteration is 0 for the same one and 1 for the previous one.
        """
        for need in self.rules.get(action.op, ()):
            found = self._of_stage.get((action.stage, need.op), ())
            if need.which is Which.SAME and need.op not in STAGE_OPS:
                same = Action(action.stage, need.op, action.microbatch)
                found = [same] if same in self._places else ()
            for needed in found:
                yield needed, int(self._places[needed] > index)
