"""The order of computation for a run's own times: what its `auto` flags choose.

Keeps one invariant: all ranks have the same times, so they choose the same order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.fold3d.plan.compile import Options, lower
from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.plan.passes.place_weight_grads import (
    HeldSizes,
    StageTimes,
    place_weight_grads,
)
from megatron.fold3d.policy.measured_times import MeasuredTimes
from megatron.fold3d.predict.search.order_choice import (
    Judge,
    OrderChoice,
    choose_order,
    worth_trying,
)
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.execution import Execution
from megatron.fold3d.predict.simulator.steady import steady_state

Build = Callable[[int | None], Plan]


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoOrder:
    """The parts of the order that measured times choose.

    Attributes:
        forwards_ahead: the user's number of forwards ahead; used unless ``auto_ahead``.
        auto_ahead: whether this number is chosen.
        auto_weight_grads: whether backwards may be split.
        most_activations: the most that a rank may hold; None is what it holds if none are delayed.
        delay_weight_grads: the segments whose weight gradients follow all backwards.
        recompute_early: the stages that recompute before their gradients arrive.
        defers: whether DP.sync may reach into the next iteration.
    """

    forwards_ahead: int | None = None
    auto_ahead: bool = False
    auto_weight_grads: bool = False
    most_activations: int | None = None
    delay_weight_grads: tuple[int, ...] = ()
    recompute_early: Sequence[int] = ()
    defers: bool = False

    def before_measuring(self, build: Build) -> Plan:
        """Return the order until times are known, as if all computations took equally long.

        Raises:
            PlanError: a rank would exceed its memory limit.
        """
        order = build(self.forwards_ahead)
        if not self.auto_weight_grads:
            return order
        ones = (1.0,) * order.num_stages
        times = StageTimes(forward_s=ones, backward_s=ones, weight_s=ones)
        return place_weight_grads(order, times, HeldSizes.counted(order, self.most_activations))

    def choose(self, times: MeasuredTimes, build: Build) -> OrderChoice:
        """Return the fastest order that fits into memory."""
        order = build(self.forwards_ahead)
        costs = costs_from_times(times)
        numbers: Sequence[int | None] = (self.forwards_ahead,)
        if self.auto_ahead:
            numbers = worth_trying(costs, order.num_ranks, order.num_microbatches)
        return choose_order(
            build,
            costs,
            self._judge(times, costs),
            forwards_ahead=numbers,
            places_weight_grads=self.auto_weight_grads,
            sizes=lambda plan: self._sizes(times, plan),
        )

    def arranged(
        self, times: MeasuredTimes, tell: Callable[[str], None]
    ) -> Callable[[Build], Plan]:
        """Return a function that makes the orders for these times and reports each choice."""

        def arrange(build: Build) -> Plan:
            choice = self.choose(times, build)
            tell(self._in_words(choice))
            return choice.plan

        return arrange

    def _in_words(self, choice: OrderChoice) -> str:
        plan = choice.plan
        parts = [f"{plan.num_microbatches} micro-batches"]
        if self.auto_ahead:
            parts.append(f"ahead={choice.forwards_ahead}")
        if self.auto_weight_grads:
            where = "in the gaps" if choice.splits else "in their backwards"
            parts.append(f"weight gradients {where}")
        return f"{', '.join(parts)}; predicted {choice.seconds:.4g} s"

    def _sizes(self, times: MeasuredTimes, plan: Plan) -> HeldSizes:
        if times.held is None or self.most_activations is not None:
            return HeldSizes.counted(plan, self.most_activations)
        return times.held

    def _judge(self, times: MeasuredTimes, costs: Costs) -> Judge:
        execution = Execution(in_order=True, grad_sync_order="edf" if self.defers else "fifo")

        def judge(order: Plan) -> tuple[bool, float]:
            options = Options(
                delay_weight_grads=self.delay_weight_grads,
                recompute_early=self.recompute_early,
                transfers=False,
                carried_stages=range(order.num_stages if self.defers else 0),
            )
            plan, held = lower(order, options), times.held
            fits = held is None or all(
                peak <= most for peak, most in zip(held.peaks(plan), held.most, strict=True)
            )
            return fits, steady_state(plan, costs, execution).period_s

        return judge


def costs_from_times(times: MeasuredTimes) -> Costs:
    """Return the costs of a run that has measured ``times``."""
    parts = zip(times.backward_s, times.recompute_s, times.weight_s, strict=True)
    return Costs(
        forward_s=times.forward_s,
        backward_s=tuple(map(sum, parts)),
        weight_s=times.weight_s,
        recompute_s=times.recompute_s,
        p2p_s=times.transfer_s,
        rings_are_buffered=times.rings_are_buffered,
        grad_sync_s=times.grad_sync_s,
    )
