"""The search for the fastest choice: coordinate descent from choices with equal segments.

A coordinate is the state of one segment, or the order of computation. From each start the search
takes the best value of one coordinate after the other until none is faster. Then it tries to
exchange the states of two segments, and last weight gradients in gaps. The search is deterministic
and improves the best start first, so it may end at any time.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from math import inf

from megatron.fold3d.plan.choice import Choice, Segment
from megatron.fold3d.plan.compile import forward_only
from megatron.fold3d.plan.ir import PlanError
from megatron.fold3d.plan.schedules import FORWARDS_AHEAD
from megatron.fold3d.policy.forwards_ahead import forwards_that_hide
from megatron.fold3d.policy.predicted import Predicted
from megatron.fold3d.predict.search.judge import Judge
from megatron.fold3d.predict.simulator.costs import Costs

MOST_ACTIONS = 600_000
"""Simulated actions of a search: 20 s at 30 us each. A time limit would depend on the machine."""
LEAST_GAIN = 0.002  # a part of the iteration that each segment with extra memory has to gain
_NEAR = 0.02  # exchanges improve only choices that are slower than the best by less than this

JudgeOf = Callable[[Choice], Judge]
"""Returns the judge of a choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The orders and the keys of segments from which a search chooses.

    Attributes:
        orders: choices whose orders may run; the search begins with the first choice.
        free: the values of each key that the search may change, as in
            ``{"wgrad": ("backward", "last")}``; other keys keep the values of the first choice.
        tied: whether the first and the last segment are summed alike, since they share the word
            embeddings.
    """

    orders: Sequence[Choice]
    free: Mapping[str, Sequence[str]] = field(default_factory=dict)
    tied: bool = False

    @property
    def first(self) -> Choice:
        """The choice with which the search begins."""
        return self.orders[0]

    @property
    def states(self) -> list[dict[str, str]]:
        """The possible states of a segment, without ``step`` and ``wgrad=gaps``."""
        free = {
            key: [value for value in values if value != "gaps"]
            for key, values in self.free.items()
            if key != "step"
        }
        return [dict(zip(free, values, strict=True)) for values in product(*free.values())]

    def starts(self) -> Iterator[Choice]:
        """Yield the choices whose segments are all in the same state, as far as they are free."""
        for step in self.free.get("step", (self.first.segments[0].step,)):
            for state in self.states:
                for order in self.orders:
                    yield order.changed(None, **state, step=step)

    def along(self, choice: Choice) -> Iterator[Iterator[Choice]]:
        """Yield, for each coordinate, the choices that differ in this coordinate alone."""
        for number in reversed(range(len(choice.segments))):  # whose backwards come first
            yield (self._with(choice, {number: state}) for state in self.states)
        yield (replace(order, segments=choice.segments) for order in self.orders)

    def exchanges(self, choice: Choice) -> Iterator[Choice]:
        """Yield the choices in which two segments have exchanged their states."""
        for a, b in combinations(range(len(choice.segments)), 2):
            one, two = (self._state(choice.segments[number]) for number in (a, b))
            if one != two:
                yield self._with(choice, {a: two, b: one})

    def in_gaps(self, choice: Choice) -> Iterator[Choice]:
        """Yield the choice with weight gradients in gaps, if ``wgrad`` is free.

        Orders with other numbers of forwards ahead follow, since their gaps differ.
        """
        if "gaps" in self.free.get("wgrad", ()):
            for order in self.orders:
                if order.order == choice.order:
                    yield replace(order, segments=choice.segments).changed(wgrad="gaps")

    def _state(self, segment: Segment) -> dict[str, str]:
        return {key: getattr(segment, key) for key in self.free if key != "step"}

    def _with(self, choice: Choice, states: Mapping[int, Mapping[str, str]]) -> Choice:
        for number, state in states.items():
            choice = choice.changed((number,), **state)
        ends = (0, len(choice.segments) - 1)
        for number in ends if self.tied else ():
            if number in states:
                choice = choice.changed(ends, optimizer=choice.segments[number].optimizer)
        return choice


class Descent:
    """Searches a space for the choices that are predicted to be the fastest.

    Args:
        most_actions: a limit on simulated actions; the first choice is simulated in any case.

    Attributes:
        found: predictions by choice; None for one that cannot run, does not fit into memory, or
            exceeded the limit.

    Raises:
        PlanError: the first choice cannot run.
    """

    def __init__(self, judge: JudgeOf, space: Space, most_actions: int = MOST_ACTIONS) -> None:
        self.found: dict[Choice, Predicted | None] = {}
        first = judge(space.first)
        self.space, self.first = _with_costs(space, first), first.predicted()
        self.judge, self._left = judge, most_actions

    @property
    def best(self) -> Predicted:
        """The prediction with the least price; the first choice's if none fits into memory."""
        if not self.found:
            self.run()
        return self.found[min(self.found, key=self.price)] or self.first

    def to_try(self) -> list[Predicted]:
        """Return at most two choices worth trying beside the first choice; the faster one first.

        One is the fastest. The other is the fastest of a second kind, whose prediction rests on
        other assumptions. If ``step`` is free, one kind carries steps, whose gain clipping decides.
        Else one kind starts reductions to shards between weight gradients, if any choice does. Else
        one kind changes nothing but the order.
        """
        if not self.found:
            self.run()
        most = self.price(self.space.first) * (1 - LEAST_GAIN)
        gaining = sorted(
            (one for one in self.found.values() if one and self.price(one.choice) < most),
            key=lambda one: self.price(one.choice),
        )
        sharded = self.first.job.gathers_params
        shards_behind = [
            bool(sharded and one.choice.where(optimizer="sharded", wgrad="behind"))
            for one in gaining
        ]
        kinds: dict[bool, Predicted] = {}
        for one, behind in zip(gaining, shards_behind, strict=True):
            if len(self.space.free.get("step", ())) > 1:
                kind = one.choice.carries
            elif any(shards_behind):
                kind = behind
            else:
                kind = self.memory(one.choice) > 0
                if not kind and not kinds:
                    return [one]  # it changes nothing but the order
            kinds.setdefault(kind, one)
        return list(kinds.values())

    def run(self) -> None:
        """Simulate until nothing is faster, or the limit is reached."""
        self.price(self.space.first)
        starts = sorted(dict.fromkeys(self.space.starts()), key=self.price)
        starts = [start for start in starts if self.price(start) < inf]
        kinds = [[start for start in starts if start.carries == carries] for carries in (0, 1)]
        for kind, others in zip(kinds, (kinds[1], ()), strict=True):
            kept = self._left // 2 if others else 0  # a run that may clip needs both kinds
            self._left -= kept
            self._improve(kind)
            self._left += kept

    def _improve(self, starts: Iterable[Choice]) -> None:
        """Descend from each start; if the result is near the best so far, try exchanges."""
        best: Choice | None = None
        for start in starts:
            end = self._descended(start)
            if best is None or self.price(end) <= (1 + _NEAR) * self.price(best):
                end = self._exchanged(end)
            best = end if best is None else self._best(best, (end,))
        if best is not None:
            self._best(best, self.space.in_gaps(best))

    def memory(self, choice: Choice) -> int:
        """Return how many segments take extra memory; all with ``wgrad=behind`` count as one."""
        places = [segment.wgrad for segment in choice.segments]
        apart = places.count("last") + places.count("gaps") + ("behind" in places)
        return apart + len(choice.where(optimizer="replicated"))

    def price(self, choice: Choice) -> float:
        """Return a choice's seconds, plus `LEAST_GAIN` for each segment with extra memory."""
        if choice not in self.found:
            self.found[choice] = self._predicted(choice)
        found = self.found[choice]
        return found.seconds * (1 + LEAST_GAIN * self.memory(choice)) if found else inf

    def _predicted(self, choice: Choice) -> Predicted | None:
        if choice == self.space.first:
            return self.first
        judge = self.judge(choice)
        if judge.num_actions > self._left:
            return None
        self._left -= judge.num_actions
        try:
            predicted = judge.predicted()
        except PlanError:
            return None
        return predicted if predicted.seconds < inf else None

    def _descended(self, choice: Choice) -> Choice:
        """Return the end of a descent: no change of one coordinate makes it faster."""
        while True:
            start = choice
            for others in self.space.along(choice):
                choice = self._best(choice, others)
            if choice == start:
                return choice

    def _exchanged(self, choice: Choice) -> Choice:
        """Return a choice that no exchange of two segments makes faster either."""
        while True:
            other = self._best(choice, self.space.exchanges(choice))
            if other == choice:
                return choice
            choice = self._descended(other)

    def _best(self, choice: Choice, others: Iterable[Choice]) -> Choice:
        """Return the fastest of a choice and some others; of equals, the first."""
        return min((choice, *others), key=self.price)


def _with_costs(space: Space, judge: Judge) -> Space:
    """Return the space without values whose costs are unknown, or that change nothing."""
    free = {**space.free}
    if not any(judge.costs.grad_sync_s):
        free.pop("step", None)
    if not any(judge.costs.weight_s):
        free.pop("wgrad", None)
    elif judge.job.num_ranks == 1 and "wgrad" in free:  # one rank waits for no other
        free["wgrad"] = [value for value in free["wgrad"] if value != "gaps"]
    return replace(space, free=free)


def orders_worth_trying(
    judge: JudgeOf, first: Choice, *, keeps_forwards: bool = False
) -> list[Choice]:
    """Return a choice, and the same choice in other orders that may be faster.

    Args:
        keeps_forwards: whether forwards have to keep their order, as with dropout.
    """
    if judge(first).job.num_ranks == 1:
        return [first]  # one rank waits for no other: the order changes nothing
    others = with_other_forwards_ahead(judge(first))
    if len(first.segments) > 1:
        others = [replace(first, order=name, group=None) for name in ("aiao", "breadth-first")]
    found = {judge(first).job.computed: first}
    forwards = forward_only(judge(first).job.computed)
    for other in others:
        order = judge(other).job.computed
        if not keeps_forwards or forward_only(order) == forwards:
            found.setdefault(order, other)
    return [*found.values()]


def with_other_forwards_ahead(judge: Judge) -> list[Choice]:
    """Return the judge's choice with each other number of forwards ahead that may be fastest."""
    first = judge.job.choice
    usual = first.ahead or FORWARDS_AHEAD[first.schedule]
    numbers = useful_forwards_ahead(judge.costs, judge.job.num_ranks, judge.job.num_microbatches)
    return [replace(first, ahead=number) for number in numbers if number != usual]


def useful_forwards_ahead(costs: Costs, num_ranks: int, num_microbatches: int) -> range:
    """Return the numbers of forwards ahead that may be fastest.

    The largest is two more than hide the transfers, which can help on a shared link while the
    pipeline fills. It is smaller than the number of micro-batches, with which the last rank but one
    already runs all forwards first.
    """
    forward_s, backward_s = max(
        zip(costs.forward_s[-num_ranks:], costs.backward_s[-num_ranks:], strict=True), key=sum
    )
    most = forwards_that_hide(forward_s, backward_s, costs.p2p_latency_s + costs.p2p_s) + 2
    return range(1, 1 + max(1, min(most, num_microbatches - 1)))
