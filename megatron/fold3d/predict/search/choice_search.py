"""``--schedule auto``: which choices are worth trying, by simulated iterations.

The search begins with stock's order. It then tries other orders, DP.sync that reaches into the next
iteration, delayed weight gradients, and segments that every replica steps in full. Each step starts
from the best choice so far, so the search may stop at any time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Self

from megatron.fold3d.plan.compile import Options, forward_only, lower
from megatron.fold3d.plan.ir import Plan, PlanError
from megatron.fold3d.plan.ops import WEIGHT_OPS
from megatron.fold3d.plan.passes.place_weight_grads import (
    HeldSizes,
    place_weight_grads,
    placements,
)
from megatron.fold3d.plan.schedules import FORWARDS_AHEAD, build
from megatron.fold3d.policy.measured_times import MeasuredTimes
from megatron.fold3d.policy.replicated_segments import (
    Segments,
    choose_replicated,
    units,
)
from megatron.fold3d.policy.run_choice import LEAST_GAIN, RunChoice, stock_schedule
from megatron.fold3d.predict.search.auto_order import costs_from_times
from megatron.fold3d.predict.search.order_choice import stage_times, worth_trying
from megatron.fold3d.predict.search.replicated_choice import with_replicated
from megatron.fold3d.predict.search.simulated_shares import auto_shares, with_shares
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.execution import Execution
from megatron.fold3d.predict.simulator.routes import NO_SWITCHES, Routes
from megatron.fold3d.predict.simulator.simulate import simulate
from megatron.fold3d.predict.simulator.steady import steady_state

MOST_ACTIONS = 600_000
"""Of a search. At 30 us each these are 20 s; counted, so that slow machines find the same."""
_STEADY = 4  # times an iteration, until one that reaches into the next is steady


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The features that a run may choose, in addition to the order.

    Attributes:
        defers: whether DP.sync may reach into the next iteration.
        delays: whether weight gradients may be apart from their backwards.
        replicates: whether segments may be stepped by every replica in full.
        gathers: whether the plan gathers parameters that are updated in shards.
        reduces_early: whether DP.sync may start between delayed weight gradients, where it is an
            all-reduce.
        tied: whether the first and the last segment add up gradients of the same parameters.
        keeps_forwards: whether forwards have to keep stock's order, as with dropout.
    """

    defers: bool = False
    delays: bool = False
    replicates: bool = False
    gathers: bool = False
    reduces_early: bool = False
    tied: bool = False
    keeps_forwards: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """A choice, and the predicted time of its iterations.

    Attributes:
        choice: the choice.
        seconds: the time of an iteration whose step is neither clipped nor skipped.
        num_early: how many delayed segments hold their operands at different times, since their
            weight gradients follow their own backwards.
    """

    choice: RunChoice
    seconds: float
    num_early: int = 0

    @property
    def price(self) -> float:
        """The seconds, plus a small penalty for each segment that takes memory."""
        choice = self.choice
        num_segments = len(choice.delayed) + len(choice.replicated)
        num_segments -= max(0, self.num_early - 1)
        num_segments += choice.order.num_segments if choice.order.has(*WEIGHT_OPS) else 0
        return self.seconds * (1 + LEAST_GAIN * num_segments)


Fits = Callable[[RunChoice, Plan], bool]
"""Tells whether memory has room for a choice, whose plan has its weight gradients."""


@dataclass(frozen=True, kw_only=True)
class ChoiceSearch:
    """The choices of a run with given costs.

    Args:
        num_ranks: pipeline ranks.
        num_segments: model chunks per rank.
        num_microbatches: micro-batches per iteration.
        costs: costs of the stages; with ``scope.gathers``, of reduce-scatters and all-gathers.
        scope: the features that may be chosen.
        group_size: the group size of stock's interleaved order; None is the number of ranks.
        fits: tells what memory has room for.
        held: what ranks may hold when weight gradients are placed; None is no more than the
            fullest rank does without.
        nic_of_rank: as in `Execution`.
        routes: as in `Execution`.
        shard_shares: as in `Execution`.
        most_actions: how many are simulated; the order of stock is simulated in any case.
        only: what takes the place of stock's order, and the only order that is tried.
        preemptive: as in `Execution`.
    """

    num_ranks: int
    num_segments: int
    num_microbatches: int
    costs: Costs
    scope: Scope
    group_size: int | None = None
    fits: Fits = lambda choice, plan: True
    held: Callable[[Plan], HeldSizes] = HeldSizes.counted
    nic_of_rank: tuple[int, ...] | None = None
    routes: Routes = NO_SWITCHES
    shard_shares: tuple[tuple[float, float], ...] = ()
    most_actions: int = MOST_ACTIONS
    only: RunChoice | None = None
    preemptive: bool = False

    @classmethod
    def measured(
        cls,
        times: MeasuredTimes,
        *,
        num_ranks: int,
        num_segments: int,
        num_microbatches: int,
        group_size: int | None,
        parameter_share: float,
        room: float,
        sizes: Sequence[float],
        shard_shares: tuple[tuple[float, float], ...] = (),
        only: RunChoice | None = None,
        preemptive: bool = False,
        **scope: bool,
    ) -> Self:
        """Return the search of a run that has measured ``times``; DP.sync is of all-reduces.

        Args:
            times: the measured times of the run.
            num_ranks: as above.
            num_segments: as above.
            num_microbatches: as above.
            group_size: as above.
            parameter_share: bytes of the parameters, as a share of those of their gradients.
            room: bytes that every rank has free.
            sizes: the bytes that a rank takes more for each segment that is replicated.
            shard_shares: as above.
            only: as above.
            preemptive: as above.
            scope: the features that may be chosen, as fields of `Scope`.
        """
        chosen = Scope(**scope)
        costs, held = costs_from_times(times), times.held
        if chosen.gathers:
            halves = tuple(s / 2 for s in times.grad_sync_s)
            gathers = tuple(s * parameter_share for s in halves)
            costs = replace(costs, grad_sync_s=halves, param_gather_s=gathers)

        def fits(choice: RunChoice, plan: Plan) -> bool:
            more = sum(sizes[segment] for segment in choice.replicated)
            if held is None:
                return more <= room
            peaks = zip(held.peaks(plan), held.most, strict=True)
            return all(peak + more <= most for peak, most in peaks)

        return cls(
            num_ranks=num_ranks,
            num_segments=num_segments,
            num_microbatches=num_microbatches,
            costs=costs,
            scope=chosen,
            group_size=group_size,
            fits=fits,
            held=HeldSizes.counted if held is None else lambda _: held,
            shard_shares=shard_shares,
            only=only,
            preemptive=preemptive,
        )

    @cached_property
    def stock(self) -> Predicted:
        """The order of stock Megatron with these model chunks, or what takes its place."""
        seconds, choice = self._simulated(next(self._orders()))
        return Predicted(choice=choice, seconds=seconds)

    def to_try(self) -> list[Predicted]:
        """Return at most two choices worth trying, besides stock's order; the faster one first.

        One is the fastest choice whose DP.sync ends with the iteration. The other is the fastest
        whose DP.sync does not, and whose gain depends on how often steps are clipped. Where DP.sync
        cannot be deferred, one starts reductions to shards between weight gradients and the other
        does not: their predictions are close to each other, and rest on different assumptions. If
        there is no such choice, the second is the fastest that changes nothing but the order, if it
        differs from the first.
        """
        gaining = [one for one in self._found() if one.price < self.stock.price * (1 - LEAST_GAIN)]
        gaining.sort(key=lambda one: one.price)
        kinds: dict[bool, Predicted] = {}
        any_early = any(one.choice.early for one in gaining)
        for one in gaining:
            kind = one.price > one.seconds
            if self.scope.defers:
                kind = one.choice.defers
            elif any_early:
                kind = bool(one.choice.early)
            kinds.setdefault(kind, one)
        best = gaining[:1]
        if best and not self.scope.defers and best[0].price == best[0].seconds:
            return best  # an order and nothing else
        return list(kinds.values())

    def seconds(self, choice: RunChoice) -> float:
        """Return what an iteration of a choice takes, in s.

        Raises:
            PlanError: it cannot run.
        """
        return self._simulated(choice)[0]

    def _simulated(self, choice: RunChoice) -> tuple[float, RunChoice]:
        """Return an iteration's seconds and the choice with the shares that were simulated."""
        plan, costs = self._plan(choice), self.costs
        execution = Execution(
            nic_of_rank=self.nic_of_rank,
            routes=self.routes,
            in_order=True,
            preemptive=self.preemptive,
            shard_shares=self.shard_shares,
        )
        if not choice.defers:
            if choice.replicated:
                costs = with_replicated(costs, choice.replicated_stages)
            return simulate(plan, costs, execution).period_s, choice
        choice = replace(choice, shares=auto_shares(plan, costs, execution))
        assert choice.shares is not None
        shared = with_shares(plan, costs, choice.shares)
        return steady_state(shared, costs, execution).period_s, choice

    def _predicted(self, choice: RunChoice, seconds: float) -> Predicted:
        early = self._options(choice).early_segments(self.num_ranks)
        return Predicted(choice=choice, seconds=seconds, num_early=len(early))

    def _plan(self, choice: RunChoice) -> Plan:
        return lower(choice.order, self._options(choice))

    def _options(self, choice: RunChoice) -> Options:
        return Options(
            delay_weight_grads=choice.delayed,
            gathers_params=self.scope.gathers,
            replicated_stages=choice.replicated_stages,
            transfers=False,
            carried_stages=range(choice.order.num_stages if choice.defers else 0),
            reduces_early=self.scope.reduces_early,
            early_dp_sync=choice.reduced_early,
        )

    def _orders(self) -> Iterator[RunChoice]:
        """Yield stock's order, then the others that these model chunks can run in."""
        if self.only is not None:
            yield self.only
            return
        schedule = stock_schedule(self.num_segments)
        made = partial(
            RunChoice, steps_shards=self.scope.gathers, reduces_early=self.scope.reduces_early
        )
        grouped = self.group_size is not None and self.num_segments > 1
        name = f"{schedule}:group={self.group_size}" if grouped else schedule
        yield made(name=name, order=self._order(schedule, self.group_size))
        if self.num_ranks == 1:
            return  # one rank waits for no other: the order changes nothing
        if self.num_segments > 1:
            for schedule in ("aiao", "breadth-first"):
                yield made(name=schedule, order=self._order(schedule))
            return
        for ahead in worth_trying(self.costs, self.num_ranks, self.num_microbatches):
            if ahead != FORWARDS_AHEAD[schedule]:
                yield made(
                    name=f"{schedule}:ahead={ahead}",
                    order=self._order(schedule, ahead=ahead),
                )

    def _order(
        self, schedule: str, group_size: int | None = None, ahead: int | None = None
    ) -> Plan:
        return build(
            schedule,
            num_ranks=self.num_ranks,
            num_segments=self.num_segments,
            num_microbatches=self.num_microbatches,
            group_size=group_size if schedule == "interleaved" else None,
            forwards_ahead=ahead,
        )

    def _found(self) -> list[Predicted]:
        """Return all choices that fit, as far as they are simulated."""
        found: list[Predicted] = []
        stock = self.stock
        once = sum(map(len, stock.choice.order.programs))
        left = self.most_actions - once

        @cache  # searches that begin elsewhere meet the same choices
        def tried(choice: RunChoice) -> float:
            """Simulate a choice, unless too much was simulated or memory has no room for it."""
            nonlocal left
            needed = once * (_STEADY if choice.defers else 1)
            if needed > left:
                return float("inf")
            left -= needed
            try:
                if not self.fits(choice, self._plan(choice)):
                    return float("inf")
                seconds, choice = self._simulated(choice)
            except PlanError:
                return float("inf")
            found.append(self._predicted(choice, seconds))
            return seconds

        def best(*, defers: bool) -> RunChoice | None:
            some = [one for one in found if one.choice.defers == defers]
            return min(some, key=lambda one: one.price).choice if some else None

        found.append(stock)
        orders = [stock.choice]
        for order in self._orders():
            if once > left:
                break
            if self._may_run(order, orders):
                orders.append(order)
                tried(order)
        if self.scope.defers:
            for order in orders:
                tried(replace(order, shares=(0.0,) * order.order.num_stages))
        if self.scope.replicates and (plain := best(defers=False)):
            self._replicate(plain, tried)
            if self.scope.delays:
                self._replicate_and_delay(plain, tried)
        if self.scope.delays:
            if self.scope.reduces_early and (plain := best(defers=False)):
                self._reduce_early(plain, tried)
            to_shards = self.scope.reduces_early and self.scope.gathers
            if to_shards:
                self._reduce_shards_early(orders[0], best(defers=False), tried)
            if self.scope.reduces_early and (plain := best(defers=True)):
                self._reduce_early_and_late(plain, tried)
            for defers in (False, True):
                if start := best(defers=defers):
                    self._delay(start, tried)
                    self._place(start, tried)
            if to_shards and (start := best(defers=False)) and not start.order.has(*WEIGHT_OPS):
                self._improve(start, tried)
        return found

    @property
    def _units(self) -> tuple[Segments, ...]:
        return units(self.num_segments, tied=self.scope.tied)

    def _may_run(self, choice: RunChoice, others: Sequence[RunChoice]) -> bool:
        """Tell whether an order is new, and keeps the order of random numbers if it has to."""
        if self.scope.keeps_forwards:
            ours, stocks = (forward_only(one.order) for one in (choice, others[0]))
            if ours != stocks:
                return False
        return all(choice.order != other.order for other in others)

    def _replicate(
        self,
        start: RunChoice,
        tried: Callable[[RunChoice], float],
        begins: Sequence[Segments] | None = None,
    ) -> RunChoice:
        """Try the segments that every replica steps in full, and return the best."""

        def seconds(segments: Segments) -> float:
            return tried(replace(start, replicated=segments))

        segments, _ = choose_replicated(self._units, seconds, begins=begins)
        return replace(start, replicated=segments)

    def _replicate_and_delay(self, start: RunChoice, tried: Callable[[RunChoice], float]) -> None:
        """Replicate the first segment, delay weight gradients, and then replicate others.

        The first segment's DP.sync is exposed at both ends of an iteration. If the segment is
        replicated, nothing is gathered at the beginning, and weight gradients can overlap its
        all-reduce at the end. Either alone gains nothing.
        """
        first = next(unit for unit in self._units if 0 in unit)
        start = self._delay(replace(start, replicated=first), tried)
        if start.delayed:
            self._replicate(start, tried, begins=(first,))

    def _reduce_early(self, start: RunChoice, tried: Callable[[RunChoice], float]) -> None:
        """Let DP.sync of some segments start between their weight gradients.

        With the distributed optimizer every replica steps these segments in full.
        """
        gathers = self.scope.gathers
        if gathers and not self.scope.replicates:
            return

        def seconds(segments: Segments) -> float:
            replicated = segments if gathers else ()
            return tried(replace(start, delayed=segments, replicated=replicated))

        choose_replicated(self._units, seconds)

    def _reduce_shards_early(
        self, plain: RunChoice, other: RunChoice | None, tried: Callable[[RunChoice], float]
    ) -> None:
        """Let reductions to shards start between weight gradients, of all segments or the first.

        All segments together hold no more memory than one, since each computes its weight gradients
        before the next one's backwards. Then try what to replicate beside them, and improve that.
        """
        every = tuple(range(self.num_segments))
        for start in (plain, other or plain):
            for segments in (every, (0,)):
                delayed = tuple(sorted({*start.delayed, *segments}))
                if early := self._to_shards(segments, start.replicated):
                    tried(replace(start, delayed=delayed, early=early))
        start = replace(plain, delayed=every, early=every)
        if self.scope.replicates:
            start = self._replicate(start, tried, begins=((),))
        self._improve(start, tried)
        last = every[-2:]
        if self.scope.replicates and last[:1] in self._units:
            # The last gather overlaps forwards of two segments, and no reduction precedes theirs.
            self._improve(replace(plain, replicated=last[:1], delayed=last, early=last), tried)

    def _improve(self, start: RunChoice, tried: Callable[[RunChoice], float]) -> None:
        """Change one segment at a time while that shortens iterations.

        Every replica steps it in full or its shard, and its weight gradients are computed in its
        backwards, behind them, or behind all backwards. There they overlap what is left of the
        first segment's DP.sync.
        """

        def price(replicated: Segments, early: Segments, last: Segments) -> float:
            choice = replace(
                start,
                replicated=replicated,
                delayed=tuple(sorted({*early, *last})),
                early=self._to_shards(early, replicated),
            )
            return self._predicted(choice, tried(choice)).price

        behind = self._options(start).early_segments(self.num_ranks)
        best = start.replicated, behind, tuple(s for s in start.delayed if s not in behind)
        while True:
            nearest = min(self._nearby(*best), key=lambda parts: price(*parts))
            if price(*nearest) >= price(*best):
                break
            best = nearest

    def _nearby(
        self, replicated: Segments, early: Segments, last: Segments
    ) -> Iterator[tuple[Segments, Segments, Segments]]:
        """Yield what differs in one segment, or in those that go together."""

        def toggled(segments: Segments, some: Segments) -> Segments:
            return tuple(sorted({*segments} ^ {*some}))

        def without(segments: Segments, some: Segments) -> Segments:
            return tuple(s for s in segments if s not in some)

        if self.scope.replicates:
            for unit in self._units:
                yield toggled(replicated, unit), early, without(last, unit)
        for segment in range(self.num_segments):
            one = (segment,)
            yield replicated, toggled(early, one), without(last, one)
            if segment not in replicated:  # what is replicated is never computed last
                yield replicated, without(early, one), toggled(last, one)

    @staticmethod
    def _to_shards(segments: Segments, replicated: Segments) -> Segments:
        """Return those whose gradients are reduced to shards; others start early in any case."""
        return tuple(segment for segment in segments if segment not in replicated)

    def _reduce_early_and_late(self, start: RunChoice, tried: Callable[[RunChoice], float]) -> None:
        """Let DP.sync start between weight gradients and reach into the next iteration.

        No DP.sync is left for the last segments' backwards, which come first: the next ones are
        tried with them, while that shortens iterations.
        """
        best_s = self.seconds(start)
        for first in range(self.num_segments - 1, 0, -1):
            last = tuple(range(first, self.num_segments))
            seconds = tried(replace(start, delayed=last, early=last))
            if seconds >= best_s * (1 - LEAST_GAIN):
                break
            best_s = seconds

    def _delay(self, start: RunChoice, tried: Callable[[RunChoice], float]) -> RunChoice:
        """Delay weight gradients of one segment more while that shortens iterations; return it."""
        best_s = self.seconds(start)
        while True:
            whole = self._options(replace(start, delayed=(0,)))
            first = 0 if whole.early_segments(self.num_ranks) else 1
            left = [s for s in range(first, self.num_segments) if s not in start.delayed]
            more = [replace(start, delayed=tuple(sorted((*start.delayed, s)))) for s in left]
            times_s = list(map(tried, more))
            if not times_s or min(times_s) >= best_s * (1 - LEAST_GAIN):
                break
            best_s = min(times_s)
            start = more[times_s.index(best_s)]
        return start

    def _place(self, start: RunChoice, tried: Callable[[RunChoice], float]) -> None:
        """Try weight gradients in the gaps of the order."""
        if self.num_ranks == 1 or start.order.has(*WEIGHT_OPS):
            return
        for at_end, overrun in placements(start.order):
            try:
                order = place_weight_grads(
                    start.order,
                    stage_times(self.costs),
                    self.held(start.order),
                    at_end=at_end,
                    overrun=overrun,
                )
            except PlanError:
                return  # memory has no room: for none of them
            name = f"{start.name}:wgrad=gaps"
            tried(replace(start, name=name, order=order, delayed=(), early=()))
