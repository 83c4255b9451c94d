"""The pass that splits every backward in two and puts weight gradients where a rank would wait.

With equal times of all computations, free transfers and three activations per rank:

    before  rank 0  0F0 0F1 0F2 0B0 0F3 0B1 0F4 0B2 0B3 0B4
            rank 1  1F0 1F1 1B0 1F2 1B1 1F3 1B2 1F4 1B3 1B4
            rank 2  2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4
    after   rank 0  0F0 0F1 0F2 0B0 0W0 0F3 0B1 0W1 0F4 0B2 0W2 0B3 0W3 0B4 0W4
            rank 1  1F0 1F1 1B0 1F2 1B1 1W0 1F3 1B2 1W1 1F4 1B3 1W2 1B4 1W3 1W4
            rank 2  2F0 2B0 2F1 2B1 2F2 2B2 2W0 2F3 2B3 2W1 2F4 2B4 2W2 2W3 2W4

Forwards and backwards keep their order, and the weight gradients of a stage are computed in the
order of the stage's backwards.
"""

import heapq
from collections import deque
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from math import inf

from megatron.fold3d.plan.ir import Action, Op, Plan, Program, error_at, gc_paused
from megatron.fold3d.plan.memory import HeldSizes

_ROUNDING = 1e-9  # relative; a computation exactly as long as a gap fits into it


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of one micro-batch in each stage, and of a transfer."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    """The backwards without weight gradients."""
    weight_s: tuple[float, ...]
    transfer_s: float = 0.0


@gc_paused()
def place_weight_grads(
    plan: Plan,
    times: StageTimes,
    held: HeldSizes | None = None,
    *,
    at_end: Container[int] = (),
    overrun: float = 0.0,
) -> Plan:
    """Compute weight gradients where a rank would wait, or where its memory is full.

    The pass simulates the order with ``times``. While a rank waits for a tensor, it computes the
    oldest weight gradients that fit into the gap. A rank whose memory is full computes the oldest
    weight gradients before its next forward. The remaining ones follow the last backward.

    With equal times 1F1B becomes ZB-H1, and with twice the forwards ahead ZB-H2 (Qi et al., 2024).

    Args:
        held: memory of micro-batches, and limits of ranks; by default `HeldSizes.counted`.
        at_end: segments whose weight gradients follow the last backward, to overlap DP.sync of the
            first segment, unless memory is full.
        overrun: the part of a weight gradient's time by which it may exceed a gap.

    Raises:
        PlanError: a rank would exceed its limit even without delayed weight gradients, or the order
            cannot run.
    """
    return _Play(plan, times, held or HeldSizes.counted(plan), at_end, overrun).placed()


@dataclass(slots=True)
class _Rank:
    number: int
    program: Program
    position: int = 0
    held: float = 0.0
    fill: deque[Action] = field(default_factory=deque)
    """Weight gradients to compute, oldest first."""
    last: deque[Action] = field(default_factory=deque)
    """Weight gradients that follow the last backward."""
    placed: list[Action] = field(default_factory=list)


@dataclass
class _Play:
    """Simulates all ranks; a rank decides when its computation ends and when a tensor arrives."""

    plan: Plan
    times: StageTimes
    held: HeldSizes
    at_end: Container[int]
    overrun: float

    def __post_init__(self) -> None:
        plan, times = self.plan, self.times
        self.seconds = {Op.FORWARD: times.forward_s, Op.BACKWARD: times.backward_s}
        self.ranks = [_Rank(*numbered) for numbered in enumerate(plan.programs)]
        # By the reading action, when its input arrives; known once the input's computation begins.
        ends = (0, Op.FORWARD), (plan.num_stages - 1, Op.BACKWARD)
        self.arrives_s = {
            Action(*end, m): -inf for end in ends for m in range(plan.num_microbatches)
        }
        self.link_free_s: dict[tuple[int, Op], float] = {}
        self.waiting: dict[Action, _Rank] = {}  # by the action whose input has not begun
        self.due = [(0.0, number) for number in range(plan.num_ranks)]

    def placed(self) -> Plan:
        while self.due:
            now_s, number = heapq.heappop(self.due)
            self._decide(self.ranks[number], now_s)
        if self.waiting:
            cells = {rank.number: rank.position for rank in self.waiting.values()}
            raise error_at(
                self.plan, cells, "no rank can go on: each needs a result that comes later or never"
            )
        for rank in self.ranks:
            rank.placed += rank.fill
            rank.placed += sorted(rank.last, key=lambda action: action.stage)  # stable
        return Plan(tuple(tuple(rank.placed) for rank in self.ranks))

    def _decide(self, rank: _Rank, now_s: float) -> None:
        """Begin a rank's next computation, or schedule the time when it can begin."""
        if rank.position == len(rank.program):
            return
        action = rank.program[rank.position]
        if not self._has_room(rank, action):
            self._weight(rank, now_s, rank.fill or rank.last)
            return
        arrives_s = self.arrives_s.get(action)
        if arrives_s is not None and arrives_s <= now_s + _ROUNDING:
            self._compute(rank, now_s, action)
            return
        if rank.fill:
            if arrives_s is None:  # the input's computation has not begun: the gap is at least it
                stage, op, _ = action
                source = stage - 1 if op is Op.FORWARD else stage + 1
                gap_s = self.seconds[op][source] + self.times.transfer_s
            else:
                gap_s = arrives_s - now_s
            needs_s = (1 - self.overrun) * self.times.weight_s[rank.fill[0].stage]
            if needs_s <= gap_s + _ROUNDING:
                self._weight(rank, now_s, rank.fill)
                return
        if arrives_s is None:
            self.waiting[action] = rank
        else:
            heapq.heappush(self.due, (arrives_s, rank.number))

    def _has_room(self, rank: _Rank, action: Action) -> bool:
        """Return True if a computation keeps a rank within its memory limit.

        Raises:
            PlanError: it does not, and no delayed weight gradients are left to free memory.
        """
        stage, op, _ = action
        adds = self.held.saved[stage]
        if op is Op.BACKWARD:
            adds = self.held.delayed[stage] - adds
        most = self.held.most[rank.number]
        if adds <= 0 or rank.held + adds <= most * (1 + _ROUNDING):
            return True
        if rank.fill or rank.last:
            return False
        raise error_at(
            self.plan,
            {rank.number: rank.position},
            f"rank {rank.number} would hold {rank.held + adds:.6g} with {action} and may hold "
            f"{most:.6g}: raise the limit, or run fewer forwards ahead",
        )

    def _compute(self, rank: _Rank, now_s: float, action: Action) -> None:
        stage, op, microbatch = action
        end_s = now_s + self.seconds[op][stage]
        rank.position += 1
        rank.placed.append(action)
        if op is Op.FORWARD:
            rank.held += self.held.saved[stage]
            reader = Action(stage + 1, op, microbatch)
        else:
            rank.held += self.held.delayed[stage] - self.held.saved[stage]
            reader = Action(stage - 1, op, microbatch)
            later = rank.last if stage // self.plan.num_ranks in self.at_end else rank.fill
            later.append(Action(stage, Op.WEIGHT, microbatch))
        if 0 <= reader.stage < self.plan.num_stages:
            arrives_s = end_s
            if self.plan.num_ranks > 1:
                arrives_s = max(end_s, self.link_free_s.get((rank.number, op), 0.0))
                arrives_s += self.times.transfer_s
                self.link_free_s[rank.number, op] = arrives_s
            self.arrives_s[reader] = arrives_s
            if (waits := self.waiting.pop(reader, None)) is not None:
                heapq.heappush(self.due, (now_s, waits.number))
        heapq.heappush(self.due, (end_s, rank.number))

    def _weight(self, rank: _Rank, now_s: float, left: deque[Action]) -> None:
        action = left.popleft()
        rank.placed.append(action)
        rank.held -= self.held.delayed[action.stage]
        heapq.heappush(self.due, (now_s + self.times.weight_s[action.stage], rank.number))


def place_with_equal_times(plan: Plan, most: int | None = None) -> Plan:
    """Place weight gradients as if all computations took equally long, when no times are known.

    Args:
        most: the micro-batches that a rank may hold: see `HeldSizes.counted`.

    Raises:
        PlanError: a rank would exceed its limit.
    """
    ones = (1.0,) * plan.num_stages
    times = StageTimes(forward_s=ones, backward_s=ones, weight_s=ones)
    return place_weight_grads(plan, times, HeldSizes.counted(plan, most))


def placed_orders(plan: Plan, times: StageTimes, held: HeldSizes) -> Iterator[Plan]:
    """Yield the placements of weight gradients that are worth trying, the simplest first.

    Raises:
        PlanError: no placement fits into memory.
    """
    for first in range(plan.num_segments, 0, -1):
        for overrun in (0.0, 0.5, 1.0):
            at_end = range(first, plan.num_segments)
            yield place_weight_grads(plan, times, held, at_end=at_end, overrun=overrun)
