"""A plan in the form that the simulator runs: with durations, and numbers instead of names.

A *fact* is that an action on a link is over, or that the input of a computation has arrived, and is
named by that action. It has a number, and it comes true once per iteration.
"""

from collections.abc import Container, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from megatron.fold3d.plan.ir import WHOLE, Action, Op, Plan, Program, carried
from megatron.fold3d.plan.ops import (
    LINK_OPS,
    P2P_OPS,
    SEND_OPS,
    SUM_OPS,
    TABLE,
    WEIGHT_OPS,
    Which,
)
from megatron.fold3d.plan.parts import part_begins
from megatron.fold3d.plan.passes.early_grad_sync import stages_in_parts
from megatron.fold3d.plan.passes.pairs import PAIRED_OPS, chains
from megatron.fold3d.plan.passes.recompute import recomputed
from megatron.fold3d.plan.passes.weight_grads import split_stages
from megatron.fold3d.plan.waits import Waits
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.pair_times import in_turns_s

NO_FACT = -1
Name = tuple[int, Op, int | None]
"""What a fact is about: equal to an action, and made in less time."""
_INPUTS = {  # by computation: from its stage to that of the one whose result it reads
    op: need.step for op, row in TABLE.items() for need in row.needs if need.which is Which.INPUT
}
_ON_END = {op: (op, step) for op, step in _INPUTS.items()}
_AT_SEND = {op: (sent := TABLE[op].needs[0].op, _INPUTS[sent]) for op in SEND_OPS}


class Step(NamedTuple):
    """An action, its seconds, and the facts it needs and brings about."""

    action: Action
    seconds: float
    needs: tuple[tuple[int, int], ...] = ()
    """Facts, and of how many iterations ago: what the rank waits for, one after the other."""
    fact: int = NO_FACT
    """What it brings about."""
    first: int = 0
    """The first iteration in which it does anything; before, it takes no time."""


class Steps:
    """The programs of a plan as steps.

    Args:
        plan: the plan to simulate.
        costs: the costs of its stages.
        shard_shares: as in `Link`.
        pairs_overlap: whether neighbours run in pairs.

    Attributes:
        plan: the plan.
        facts: the number of each fact.
        named: what each fact is about, by its number, as a plain tuple.
        rank_of: the rank that may wait for each fact.
        programs: one list of steps per rank.
    """

    def __init__(
        self,
        plan: Plan,
        costs: Costs,
        *,
        shard_shares: Sequence[tuple[float, float]] = (),
        pairs_overlap: bool = False,
    ) -> None:
        self.plan = plan
        self._costs, self._shard_shares = costs, shard_shares
        # By op: the computation whose result leaves there, and the step to who reads it.
        self._senders = _ON_END if not plan.has(*P2P_OPS) else _AT_SEND
        self._recomputed = frozenset().union(*map(recomputed, plan.programs))
        paired = chain.from_iterable(map(chains, plan.programs)) if pairs_overlap else ()
        self._paired_s = dict(chain.from_iterable(map(self._in_turns, paired)))
        self._seconds: dict[Op, tuple[float, ...]] = {
            op: getattr(costs, row.cost) for op, row in TABLE.items() if row.cost
        } | {
            Op.BACKWARD: _backward_s(plan, costs),
            **dict.fromkeys(
                WEIGHT_OPS, tuple(weight_s + costs.split_s for weight_s in costs.weight_s)
            ),
        }
        self.facts: dict[Name, int] = {}
        self.programs = [list(self._steps(program)) for program in plan.programs]
        self.named = list(self.facts)
        ranks = plan.num_ranks
        self.rank_of = [stage % ranks for stage, _, _ in self.named]

    def _steps(self, program: Program) -> Iterator[Step]:
        kept = frozenset(stage for stage, op, _ in program if op is Op.REDUCE_KEPT)
        if kept and not any(self._costs.reduced_in_iteration_s):  # then it does nothing
            program = tuple(action for action in program if action.op is not Op.REDUCE_KEPT)
            kept = frozenset()
        waits, late = Waits(program), carried(program)
        parts, stages = self._parts_s(program, kept), self.plan.num_stages
        facts = self.facts
        number = facts.setdefault
        senders, alike = self._senders, not (self._paired_s or self._recomputed)
        for index, action in enumerate(program):
            stage, op, microbatch = action
            needs: tuple[tuple[int, int], ...] = ()
            reads = op in _INPUTS and 0 <= stage + _INPUTS[op] < stages
            if reads and op not in waits.rules:
                needs = ((number(action, len(facts)), 0),)
            elif reads or op in waits.rules:
                needs = tuple(self._needs(action, index, waits, reads=reads))
            fact = NO_FACT
            if (sent := senders.get(op)) is not None:
                computation, step = sent
                if 0 <= (reader := stage - step) < stages:
                    fact = number((reader, computation, microbatch), len(facts))
            elif op in LINK_OPS:
                fact = number(action, len(facts))
            end = late.get(stage, -1)
            first = int(index == end or (index < end and op in SUM_OPS))
            if action in parts:
                seconds = parts[action]
            elif alike:
                by_stage = self._seconds.get(op)
                seconds = by_stage[stage] if by_stage else 0.0
            else:
                seconds = self._seconds_of(action)
            yield Step(action, seconds, needs, fact, first)

    def _needs(
        self, action: Action, index: int, waits: Waits, *, reads: bool
    ) -> Iterator[tuple[int, int]]:
        """Yield what an action waits for."""
        facts = self.facts
        for needed, ago in waits.at(index, action):
            yield facts.setdefault(needed, len(facts)), ago
        if reads:
            yield facts.setdefault(action, len(facts)), 0

    def _in_turns(self, together: Program) -> Iterator[tuple[Action, float]]:
        """Yield the computations of a chain with their seconds; an odd one is alone at the end."""
        computed = [action for action in together if action.op in PAIRED_OPS]
        for first, second in zip(computed[::2], computed[1::2], strict=False):
            stage, op, microbatch = first
            times_s = in_turns_s(
                self._costs,
                stage,
                op,
                early=(stage, microbatch) in self._recomputed,
                ends=second in computed[-2:],
            )
            yield from zip((first, second), times_s, strict=True)

    def _seconds_of(self, action: Action) -> float:
        stage, op, microbatch = action
        if action in self._paired_s:
            return self._paired_s[action]
        by_stage = self._seconds.get(op, ())
        seconds = by_stage[stage] if by_stage else 0.0
        if op is Op.BACKWARD and (stage, microbatch) in self._recomputed:
            seconds -= self._costs.recompute_s[stage] if self._costs.recompute_s else 0.0
        return seconds

    def _parts_s(self, program: Program, kept: Container[int]) -> dict[Action, float]:
        """Return the seconds of each part of a stage's DP.sync, or of its weight gradients."""
        in_parts = stages_in_parts(program) if self._shard_shares else ()
        seconds: dict[Action, float] = {}
        for action, begin in part_begins(program).items():
            stage, op, _ = action
            whole_s = self._seconds_of(action)
            if op not in SUM_OPS:
                whole_s *= self.plan.num_microbatches
            elif stage in kept:
                whole_s -= self._seconds_of(Action(stage, Op.REDUCE_KEPT))
            shares = begin / WHOLE, action.end / WHOLE
            if op is Op.REDUCE_SCATTER and stage in in_parts:
                shares = self._started(shares[0]), self._started(shares[1])
            seconds[action] = whole_s * (shares[1] - shares[0])
        return seconds

    def _started(self, work: float) -> float:
        """Return which share of a reduction to shards has started after a share of the work."""
        return max((share for done, share in self._shard_shares if done <= work), default=0.0)


def _backward_s(plan: Plan, costs: Costs) -> tuple[float, ...]:
    """Return the seconds of each stage's backward, without weight gradients if they are split."""
    if not costs.weight_s:
        return costs.backward_s
    split = frozenset().union(*map(split_stages, plan.programs))
    return tuple(
        whole_s - weight_s * (stage in split)
        for stage, (whole_s, weight_s) in enumerate(
            zip(costs.backward_s, costs.weight_s, strict=True)
        )
    )
