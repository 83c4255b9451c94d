"""A plan in the form that the simulator runs: with durations, and numbers instead of names.

A *fact* is something that a rank may wait for, such as that a message has arrived or that a stage's
gradients are reduced. It has a number, and it comes true once per iteration.
"""

from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple

from megatron.fold3d.plan.ir import WHOLE, Action, Op, Plan, Program
from megatron.fold3d.plan.ops import COMPUTE_OPS, COPY_OPS, TABLE, WEIGHT_OPS, awaited
from megatron.fold3d.plan.passes.early_grad_sync import (
    sizes_of_parts,
    slices_parts_only,
    stages_in_parts,
)
from megatron.fold3d.plan.passes.grad_sync import deferred_stages, slices_of
from megatron.fold3d.plan.passes.pairs import pairs, second_of
from megatron.fold3d.plan.passes.recompute import recomputed
from megatron.fold3d.plan.passes.weight_grads import split_stages
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.pair_times import paired_s


class Fact(IntEnum):
    """A kind of fact about a stage and a micro-batch (zero, for the whole stage)."""

    FORWARD_INPUT = 0
    BACKWARD_INPUT = 1
    RELOADED = 2
    GRADS_SYNCED = 3
    PARAMS_GATHERED = 4
    PARAMS_GATHERED_AGAIN = 5
    REDUCED_IN_ITERATION = 6


_FACT_OF = {
    Op.REDUCE_GRAD: Fact.GRADS_SYNCED,
    Op.REDUCE_SLICE: Fact.GRADS_SYNCED,
    Op.GATHER_PARAM: Fact.PARAMS_GATHERED,
    Op.GATHER_PARAM_B: Fact.PARAMS_GATHERED_AGAIN,
    Op.RELOAD: Fact.RELOADED,
}
NO_FACT = -1


class Step(NamedTuple):
    """An action, its seconds, and the facts it needs and brings about."""

    action: Action
    seconds: float
    needs: tuple[int, ...] = ()  # true in this iteration before a computation starts
    fact: int = NO_FACT  # what it brings about; what a WAIT_ waits for


class Steps:
    """The programs of a plan as steps.

    Args:
        plan: the plan to simulate.
        costs: the costs of its stages.
        backward_share: by stage, the part of DP.sync that its REDUCE_GRAD starts. The rest of all
            stages follows the last action, in the order of the next forward. If the plan gathers
            parameters, this holds for the rank's first stage only; the rest of another stage
            follows the all-gather of the stage before, from the first iteration on. If empty,
            REDUCE_GRAD starts all of DP.sync. A plan with slices has its own shares, but for
            slices between weight gradients: those start what is complete of the backward share.

        shard_shares: as in `Execution`.
        pairs_overlap: whether neighbours run in pairs, which begin when both inputs are there.

    Attributes:
        programs: one list of steps per rank.
        num_facts: facts are numbered below this.
    """

    def __init__(
        self,
        plan: Plan,
        costs: Costs,
        backward_share: Sequence[float] = (),
        *,
        shard_shares: Sequence[tuple[float, float]] = (),
        pairs_overlap: bool = False,
    ) -> None:
        self._shard_shares = shard_shares
        self._plan = plan
        self._microbatches, self._stages = plan.num_microbatches, plan.num_stages
        self._send_on_end = not plan.has_p2p
        self._reloads = {a for program in plan.programs for a in program if a.op is Op.RELOAD}
        self._costs = costs
        first = frozenset().union(*map(pairs, plan.programs)) if pairs_overlap else frozenset()
        self._second_of = {action: second_of(action) for action in first}
        self._paired = frozenset({*self._second_of, *self._second_of.values()})
        self._recompute_s = costs.recompute_s
        self._recomputed = frozenset().union(*map(recomputed, plan.programs))
        self._seconds: dict[Op, tuple[float, ...]] = {
            op: getattr(costs, row.cost) for op, row in TABLE.items() if row.cost
        } | {
            Op.BACKWARD: _backward_s(plan, costs),
            **dict.fromkeys(
                WEIGHT_OPS, tuple(weight_s + costs.split_s for weight_s in costs.weight_s)
            ),
        }
        self._part_sizes: dict[Action, int] = {}
        for program in plan.programs if plan.has(Op.WEIGHT_PART) else ():
            self._part_sizes |= sizes_of_parts(program)
        self.num_facts = len(Fact) * self._stages * self._microbatches
        in_iteration_s = costs.reduced_in_iteration_s or (0.0,) * self._stages
        if backward_share and slices_parts_only(plan):
            self.programs = [
                list(self._split(program, backward_share, in_iteration_s))
                for program in plan.programs
            ]
        elif plan.has(Op.REDUCE_SLICE):
            self.programs = [
                list(self._sliced(program, in_iteration_s)) for program in plan.programs
            ]
        else:
            self.programs = [list(map(self._step, program)) for program in plan.programs]

    @property
    def num_ranks(self) -> int:
        """The number of pipeline ranks."""
        return self._plan.num_ranks

    def is_reduced_in_iteration(self, fact: int) -> bool:
        """Return True if a fact is about the part of DP.sync that is reduced in its iteration."""
        return fact >= self._fact(Fact.REDUCED_IN_ITERATION, 0)

    def rank_of(self, fact: int) -> int:
        """Return the rank that may wait for a fact."""
        return fact // self._microbatches % self._plan.num_ranks

    def arrival(self, receive: Action) -> int:
        """Return the fact that the message of a RECV has arrived."""
        stage, op, microbatch = receive
        kind = Fact.FORWARD_INPUT if op is Op.RECV_F else Fact.BACKWARD_INPUT
        return self._fact(kind, stage, microbatch)

    def _fact(self, kind: Fact, stage: int, microbatch: int | None = None) -> int:
        return (kind * self._stages + stage) * self._microbatches + (microbatch or 0)

    def _step(self, action: Action) -> Step:
        stage, op, microbatch = action
        by_stage = self._seconds.get(op, ())
        seconds = by_stage[stage] if by_stage else 0.0
        if self._recompute_s and op is Op.BACKWARD and (stage, microbatch) in self._recomputed:
            seconds -= self._recompute_s[stage]
        elif op is Op.WEIGHT_PART:
            seconds *= self._microbatches * self._part_sizes[action] / WHOLE
        if op in COMPUTE_OPS:
            message = self._message(stage, op, microbatch) if self._send_on_end else NO_FACT
            needs = self._needs(stage, op, microbatch)
            if action in self._paired:
                early = (stage, microbatch) in self._recomputed
                seconds = paired_s(self._costs, stage, op, early=early)
            if (second := self._second_of.get(action)) is not None:
                needs += self._needs(stage, op, second.microbatch)
            return Step(action, seconds, needs, message)
        if op is Op.SEND_F or op is Op.SEND_B:
            source = Op.FORWARD if op is Op.SEND_F else Op.BACKWARD
            return Step(action, 0.0, (), self._message(stage, source, microbatch))
        if (kind := _FACT_OF.get(awaited(op) or op)) is not None:
            return Step(
                action, seconds, (), self._fact(kind, stage, microbatch if op in COPY_OPS else None)
            )
        return Step(action, seconds)

    def _split(
        self, program: Program, backward_share: Sequence[float], in_iteration_s: Sequence[float]
    ) -> Iterator[Step]:
        """Cut each DP.sync: reduced in the iteration, started at once, and the deferred rest."""
        reduced = sorted(action.stage for action in program if action.op is Op.REDUCE_GRAD)
        late_s = {
            stage: self._step(Action(stage, Op.REDUCE_GRAD)).seconds - in_iteration_s[stage]
            for stage in reduced
        }
        gathers = any(action.op is Op.GATHER_PARAM for action in program)
        follows = dict(pairwise(reduced)) if gathers else {}

        def part(stage: int, share: float) -> Step:
            step = self._step(Action(stage, Op.REDUCE_GRAD))
            return step._replace(seconds=share * late_s[stage])

        def rest(stage: int) -> Step:
            return part(stage, 1 - backward_share[stage])

        in_iteration = []
        begun = dict.fromkeys(reduced, 0.0)  # the share that has started early, by stage
        for action in program:
            stage = action.stage
            if action.op is Op.REDUCE_SLICE:
                assert action.microbatch is not None
                end = min(action.microbatch / WHOLE, backward_share[stage])
                yield part(stage, end - begun[stage])._replace(action=action)
                begun[stage] = end
                continue
            if action.op is not Op.REDUCE_GRAD:
                yield self._step(action)
                if action.op is Op.GATHER_PARAM and stage in follows:
                    yield rest(follows[stage])
                continue
            if part_s := in_iteration_s[stage]:
                in_iteration.append(Action(stage, Op.WAIT_GRAD))
                yield Step(action, part_s, (), self._fact(Fact.REDUCED_IN_ITERATION, stage))
            yield part(stage, backward_share[stage] - begun[stage])
        yield from (rest(stage) for stage in reduced if stage not in follows.values())
        for action in in_iteration:
            yield Step(action, 0.0, (), self._fact(Fact.REDUCED_IN_ITERATION, action.stage))

    def _sliced(self, program: Program, in_iteration_s: Sequence[float]) -> Iterator[Step]:
        """Give each slice its part of DP.sync; the part reduced in the iteration starts first."""
        deferred, grad_sync_s = deferred_stages(program), self._seconds[Op.REDUCE_GRAD]
        gather_s, early = self._seconds[Op.GATHER_PARAM], stages_in_parts(program)
        part_s: dict[Action, float] = {}
        first: set[Action] = set()
        for stage, slices in slices_of(program).items():
            whole_s = grad_sync_s[stage] if grad_sync_s else 0.0
            if stage in deferred and in_iteration_s[stage]:
                first.add(slices[0])
                whole_s -= in_iteration_s[stage]
            in_shards = stage in early and gather_s and gather_s[stage] > 0
            begin = 0.0
            for action in slices:
                until = action.microbatch if action.op is Op.REDUCE_SLICE else WHOLE
                assert until is not None
                end = self._share_of_shards(until / WHOLE) if in_shards else until / WHOLE
                part_s[action] = (end - begin) * whole_s
                begin = end
        for action in program:
            step = self._step(action)
            if action in first:
                fact = self._fact(Fact.REDUCED_IN_ITERATION, action.stage)
                yield Step(action, in_iteration_s[action.stage], (), fact)
            yield step._replace(seconds=part_s[action]) if action in part_s else step
        for stage in sorted(action.stage for action in first):
            fact = self._fact(Fact.REDUCED_IN_ITERATION, stage)
            yield Step(Action(stage, Op.WAIT_GRAD), 0.0, (), fact)

    def _share_of_shards(self, work: float) -> float:
        """Return which share of a reduction to shards has started after a share of the work."""
        if not self._shard_shares:
            return work
        done = [share for needed, share in self._shard_shares if needed <= work]
        return done[-1] if done else 0.0

    def _message(self, stage: int, op: Op, microbatch: int | None) -> int:
        """Return the fact that a computation's result has arrived at the stage that reads it."""
        if op is Op.FORWARD and stage + 1 < self._stages:
            return self._fact(Fact.FORWARD_INPUT, stage + 1, microbatch)
        if op is Op.BACKWARD and stage > 0:
            return self._fact(Fact.BACKWARD_INPUT, stage - 1, microbatch)
        return NO_FACT

    def _needs(self, stage: int, op: Op, microbatch: int | None) -> tuple[int, ...]:
        if op is Op.FORWARD:
            return (self._fact(Fact.FORWARD_INPUT, stage, microbatch),) if stage else ()
        if op in WEIGHT_OPS:
            return ()
        needs = []
        if op is Op.BACKWARD and stage + 1 < self._stages:
            needs.append(self._fact(Fact.BACKWARD_INPUT, stage, microbatch))
        if self._reloads and (stage, Op.RELOAD, microbatch) in self._reloads:
            needs.append(self._fact(Fact.RELOADED, stage, microbatch))
        return tuple(needs)


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
