"""A plan in the form that the simulator runs: with durations, and numbers instead of names.

A *fact* says that an action on a link has ended, or that the input of a computation has arrived. It
is named by the action or the computation, has a number, and comes true once per iteration.
"""

from collections.abc import Container, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from megatron.fold3d.plan.ir import WHOLE, Action, Op, Plan, Program, carried
from megatron.fold3d.plan.ops import (
    COMPUTE_OPS,
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
from megatron.fold3d.plan.passes.recompute import recomputed
from megatron.fold3d.plan.passes.weight_grads import split_stages
from megatron.fold3d.plan.waits import Waits
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.link import Link

NO_FACT = -1
_MOST_EXCHANGES = 8  # all-to-alls of a computation; simulating more changes no other traffic
Name = tuple[int, Op, int | None]
"""The name of a fact: a plain tuple equals an `Action`, and is faster to make."""
_INPUTS = {  # by computation: the distance to the stage whose result it reads
    op: need.step for op, row in TABLE.items() for need in row.needs if need.which is Which.INPUT
}
_ON_END = {op: (op, step) for op, step in _INPUTS.items()}
_AT_SEND = {op: (sent := TABLE[op].needs[0].op, _INPUTS[sent]) for op in SEND_OPS}


class Step(NamedTuple):
    """An action with its seconds, the facts that it needs, and the fact that it makes true."""

    action: Action
    seconds: float
    needs: tuple[tuple[int, int], ...] = ()
    """Pairs of a fact and a number of iterations ago; the rank waits for one after the other."""
    fact: int = NO_FACT
    """The fact that comes true when the action ends."""
    first: int = 0
    """The first iteration in which the action takes time: a carried one has no work before."""


class Exchange(NamedTuple):
    """The all-to-alls of a computation with experts on other nodes."""

    share: float
    """The seconds of all-to-alls at the full rate of a NIC, divided by the computation's."""
    number: int
    """The number of all-to-alls, all equally long."""
    beside: bool
    """Whether all-to-alls overlap the computation."""


class Steps:
    """The programs of a plan as steps, with the rules by which they run.

    Attributes:
        sends_waited_for: see `Link`; empty if messages are buffered.
        named: the name of each fact, by its number.
        exchanges: the all-to-alls of computations, if experts are on other nodes.
    """

    def __init__(self, plan: Plan, costs: Costs, link: Link) -> None:
        self.plan, self.costs, self.link = plan, costs, link
        self.nics = link.nic_of_rank or tuple(range(plan.num_ranks))
        self.sends_waited_for = frozenset() if costs.sends_are_buffered else link.sends_waited_for
        # By op: the computation whose result is sent, and the distance to the reading stage.
        self._senders = _ON_END if not plan.has(*P2P_OPS) else _AT_SEND
        self._seconds: dict[Op, tuple[float, ...]] = {
            op: getattr(costs, row.cost) for op, row in TABLE.items() if row.cost
        } | {
            Op.BACKWARD: _backward_s(plan, costs),
            **dict.fromkeys(
                WEIGHT_OPS, tuple(weight_s + costs.split_s for weight_s in costs.weight_s)
            ),
        }
        self._recomputed = frozenset().union(*map(recomputed, plan.programs))
        # Actions whose seconds differ from others of the same op and stage.
        backward_s, early = self._seconds[Op.BACKWARD], self._recomputed
        self._own_s = {
            Action(stage, Op.BACKWARD, number): backward_s[stage] - costs.recompute_s[stage]
            for stage, number in (early if costs.recompute_s else ())
        }
        self._part: dict[Action, float] = {}  # an action's part of its pair's all-to-alls
        self._beside: set[Action] = set()  # actions whose all-to-alls overlap computation
        if link.overlap_tensor_parallel:
            from megatron.fold3d.plan.passes.pairs import chains

            for together in chain.from_iterable(map(chains, plan.programs)):
                self._pair_up([action for action in together if action.op in COMPUTE_OPS])
        if link.combined:
            from megatron.fold3d.plan.passes.combined import combined

            for both in chain.from_iterable(map(combined, plan.programs)):
                self._combine(both)
        self.exchanges = dict(self._exchanges())
        self.facts: dict[Name, int] = {}
        self.programs = [list(self._steps(program)) for program in plan.programs]
        self.named = list(self.facts)
        ranks = plan.num_ranks
        self.rank_of = [stage % ranks for stage, _, _ in self.named]

    def _steps(self, program: Program) -> Iterator[Step]:
        kept = frozenset(stage for stage, op, _ in program if op is Op.REDUCE_KEPT)
        if kept and not any(self.costs.reduced_in_iteration_s):  # REDUCE_KEPT takes no time
            program = tuple(action for action in program if action.op is not Op.REDUCE_KEPT)
            kept = frozenset()
        waits, late = Waits(program), carried(program)
        self._own_s.update(self._parts_s(program, kept))
        own_s, stages = self._own_s, self.plan.num_stages
        facts, senders = self.facts, self._senders
        number = facts.setdefault
        for index, action in enumerate(program):
            stage, op, microbatch = action
            needs: tuple[tuple[int, int], ...] = ()
            if op in waits.rules:
                awaited = waits.at(index, action)
                needs = tuple((number(needed, len(facts)), ago) for needed, ago in awaited)
            if op in _INPUTS and 0 <= stage + _INPUTS[op] < stages:
                needs += ((number(action, len(facts)), 0),)
            fact = NO_FACT
            if (sent := senders.get(op)) is not None:
                computation, step = sent
                if 0 <= (reader := stage - step) < stages:
                    fact = number((reader, computation, microbatch), len(facts))
            elif op in LINK_OPS:
                fact = number(action, len(facts))
            end = late.get(stage, -1)
            first = int(index == end or (index < end and op in SUM_OPS))
            seconds = own_s.get(action)
            if seconds is None:
                seconds = self._whole_s(stage, op)
            yield Step(action, seconds, needs, fact, first)

    def _pair_up(self, computed: Sequence[Action]) -> None:
        """Let the computations of a chain run in pairs; of an odd number, the last runs alone."""
        from megatron.fold3d.predict.simulator.pair_times import in_turns_s

        for first, second in zip(computed[::2], computed[1::2], strict=False):
            stage, op, microbatch = first
            times_s = in_turns_s(
                self.costs,
                stage,
                op,
                early=(stage, microbatch) in self._recomputed,
                ends=second in computed[-2:],
            )
            both_s = sum(times_s)
            for action, seconds in zip((first, second), times_s, strict=True):
                self._own_s[action] = seconds
                self._part[action] = 2 * seconds / both_s if both_s else 1.0
            self._beside |= {first, second}
        if computed and computed[0].op is Op.BACKWARD:  # the first one begins alone
            self._beside.discard(computed[0])

    def _combine(self, both: tuple[Action, Action]) -> None:
        """Let a forward and a backward hide each other's all-to-alls.

        This is an upper bound on stock's gain, since the ends of both hide as much as the middle.
        """
        whole_s = [self._own_s.get(action, self._whole_s(*action[:2])) for action in both]
        sent_s = sum(self.costs.ep_sync_s[action.stage] for action in both)
        both_s = max(sum(whole_s) - sent_s, sent_s)
        for action, seconds in zip(both, whole_s, strict=True):
            self._own_s[action] = seconds * both_s / sum(whole_s)
        self._beside.update(both)

    def _exchanges(self) -> Iterator[tuple[Action, Exchange]]:
        """Yield each computation's all-to-alls; a pair's are divided in proportion to its times."""
        costs = self.costs
        sends = costs.ep_sync_on_nic and any(costs.ep_sync_s)
        whole_ops = COMPUTE_OPS - WEIGHT_OPS  # they run through all layers of a stage
        for action in chain.from_iterable(self.plan.programs) if sends else ():
            stage, op, microbatch = action
            seconds = self._own_s.get(action, self._whole_s(stage, op))
            if op in whole_ops and seconds and costs.ep_sync_s[stage]:
                part = self._part.get(action, 1.0)
                part *= costs.passes(stage, op, early=(stage, microbatch) in self._recomputed)
                number = round(part * (costs.collectives[stage] if costs.collectives else 1))
                number = max(1, min(number, _MOST_EXCHANGES))
                share = min(1.0, part * costs.ep_sync_s[stage] / seconds)
                yield action, Exchange(share, number, action in self._beside)

    def _whole_s(self, stage: int, op: Op) -> float:
        by_stage = self._seconds.get(op)
        return by_stage[stage] if by_stage else 0.0

    def _parts_s(self, program: Program, kept: Container[int]) -> dict[Action, float]:
        """Return the seconds of each part of a stage's DP.sync, or of its weight gradients."""
        in_parts = stages_in_parts(program) if self.link.shard_shares else ()
        seconds: dict[Action, float] = {}
        for action, begin in part_begins(program).items():
            stage, op, _ = action
            whole_s = self._whole_s(stage, op)
            if op not in SUM_OPS:
                whole_s *= self.plan.num_microbatches
            elif stage in kept:
                whole_s -= self._whole_s(stage, Op.REDUCE_KEPT)
            shares = begin / WHOLE, action.end / WHOLE
            if op is Op.REDUCE_SCATTER and stage in in_parts:
                shares = self._started(shares[0]), self._started(shares[1])
            seconds[action] = whole_s * (shares[1] - shares[0])
        return seconds

    def _started(self, work: float) -> float:
        """Return the started share of a reduction to shards, after a share of the weight work."""
        shares = self.link.shard_shares
        return max((share for done, share in shares if done <= work), default=0.0)


def _backward_s(plan: Plan, costs: Costs) -> tuple[float, ...]:
    """Return the seconds of each stage's backward, without weight gradients if they are split."""
    split = frozenset().union(*map(split_stages, plan.programs))
    both = zip(costs.input_s, costs.backward_s, strict=True)
    return tuple(
        input_s if stage in split else whole_s for stage, (input_s, whole_s) in enumerate(both)
    )
