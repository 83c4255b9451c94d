"""One run, simulated: what `auto` leaves open in it is settled first, by simulated iterations.

`--check` and `fold3d simulate` both predict runs here.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Self

from megatron.fold3d.observe.memory_curve import Footprint, memory
from megatron.fold3d.observe.timeline import Timeline
from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.plan.passes.pairs import check_pairs
from megatron.fold3d.plan.passes.place_weight_grads import HeldSizes
from megatron.fold3d.plan.passes.recompute import recompute_early
from megatron.fold3d.plan.schedule_word import Segments
from megatron.fold3d.policy.partition import Layers, best_partition
from megatron.fold3d.policy.replicated_segments import choose_replicated, units
from megatron.fold3d.predict.cost_model.estimate import Estimate
from megatron.fold3d.predict.cost_model.model_shape import ModelShape
from megatron.fold3d.predict.cost_model.recompute_by_stage import fewest_recomputed
from megatron.fold3d.predict.cost_model.sharded_footprint import sharded_footprint
from megatron.fold3d.predict.search.candidate_timeline import order_of, plan_of, simulated_plan
from megatron.fold3d.predict.search.candidates import Candidate
from megatron.fold3d.predict.search.order_choice import (
    at_most,
    check_most,
    choose_order,
    held_sizes,
    stage_times,
    worth_trying,
)
from megatron.fold3d.predict.search.rank_work import rank_times

_MOST_LAYOUTS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRun:
    """A run, and what its flags leave open.

    Attributes:
        candidate: the run; it recomputes early where ``early`` says so.
        estimate: the costs and the memory of a candidate.
        file_order: the plan of the user's file, which replaces the schedule's order.
        early: the stages that recompute before their gradients arrive.
        shape: the model, if there is one.
        usable_bytes: of a GPU's memory; None if it is not known.
        auto_layers: whether the layers of each stage are to be chosen.
        auto_recompute_layers: whether the number of layers that stages recompute is.
        auto_ahead: whether the number of forwards ahead is.
        auto_replicated: whether the segments are that every replica steps in full.
        most_activations: as in `order_choice.at_most`, of weight gradients in gaps.
        how: how layers were chosen.
    """

    candidate: Candidate
    estimate: Callable[[Candidate], Estimate]
    file_order: Plan | None = None
    early: tuple[int, ...] = ()
    shape: ModelShape | None = None
    usable_bytes: float | None = None
    auto_layers: bool = False
    auto_recompute_layers: bool = False
    auto_ahead: bool = False
    auto_replicated: bool = False
    most_activations: int | None = None
    how: str = ""

    @property
    def known(self) -> Estimate:
        """The costs and the memory of the candidate."""
        return self.estimate(self.candidate)

    def order(self) -> Plan:
        """Return the order of computation."""
        return self._recomputing(self._plain_order(self.candidate.forwards_ahead))

    def simulated(self, order: Plan | None = None) -> tuple[Plan, Timeline]:
        """Return the plan and its simulated iterations; the last one is steady."""
        return simulated_plan(self.candidate, self.known, order or self.order())

    def footprint(self, order: Plan) -> Footprint:
        """Return the bytes that ranks, and micro-batches of stages, hold."""
        known, setup = self.known, self.candidate.setup
        if self.candidate.shards == "off":
            return known.footprint
        freeing = plan_of(self.candidate, order)
        return sharded_footprint(known.footprint, freeing, known.gradient_bytes, setup)

    def peaks(self, order: Plan, timeline: Timeline) -> list[float]:
        """Return the most bytes that each rank's GPU holds; nothing without a model."""
        if self.shape is None:
            return []
        ranks = memory(timeline, self.footprint(order))
        return [rank.device.peak_bytes for rank in ranks]

    def settled(self) -> tuple[Self, Plan]:
        """Return the run with choices for what is open in it, and its order of computation.

        Raises:
            ValueError: no choice can run, or fits into memory.
        """
        run = self._with_layers()._with_counts()
        run, order = run._with_order()
        if run.candidate.overlap_tensor_parallel:
            check_pairs(order)
        return run._with_replicated(order), order

    def held_sizes(self, plan: Plan) -> HeldSizes:
        """Return what micro-batches hold, and what ranks may hold."""
        if self.usable_bytes is None or self.most_activations is not None:
            return at_most(self.most_activations)(plan)
        return held_sizes(self.known.footprint, plan, self.usable_bytes)

    def _with(self, candidate: Candidate) -> Self:
        return replace(self, candidate=candidate)

    def _judged(self, order: Plan) -> tuple[bool, float]:
        """Tell whether memory has room for an order, and the seconds of its iteration."""
        _, timeline = self.simulated(order)
        peak = max(self.peaks(order, timeline), default=0.0)
        return peak <= (self.usable_bytes or inf), timeline.period_s

    def _plain_order(self, ahead: int | None) -> Plan:
        if self.file_order is not None:
            return self.file_order
        return order_of(replace(self.candidate, forwards_ahead=ahead, recompute_early=False))

    def _recomputing(self, order: Plan) -> Plan:
        return recompute_early(order, self.early, in_pairs=self.candidate.overlap_tensor_parallel)

    def _with_layers(self) -> Self:
        if not self.auto_layers or self.shape is None:
            return self
        c, shape = self.candidate, self.shape
        for found, is_open in (
            ("--recompute-layers with numbers", c.recompute_layers),
            ("optimizer=", c.replicated or self.auto_replicated),
            ("ahead=auto or wgrad=gaps", c.places_weight_grads or self.auto_ahead),
        ):
            if is_open:
                raise ValueError(
                    f"--layers auto with {found}: that is for layers that are known; give numbers "
                    "for --layers, or drop one of the two"
                )
        order = self.order()

        def iteration_s(layers: Layers) -> float:
            try:
                run = self._with(replace(c, layers=layers))._with_counts()
            except ValueError:  # not even with all layers recomputed
                return inf
            fits, seconds = run._judged(order)
            return seconds if fits else inf

        times = None
        are_alike = len({*map(shape.layer_flops, range(shape.num_layers))}) == 1
        if are_alike and not c.overlap_tensor_parallel:  # a pair takes less than its halves
            times = rank_times(
                lambda layers: self.estimate(replace(c, layers=layers)).costs,
                c.layers,
                c.num_ranks,
                c.num_microbatches,
                may_keep_layers=self.auto_recompute_layers,
            )
        best = best_partition(
            c.layers, iteration_s=iteration_s, times=times, most_simulated=_MOST_LAYOUTS
        )
        how = "none is better" if best.is_exact else f"best of {best.simulated} tried"
        return replace(self, candidate=replace(c, layers=best.layers), how=how)

    def _with_counts(self) -> Self:
        """Choose the fewest layers to recompute that fit."""
        if not self.auto_recompute_layers or self.shape is None or self.usable_bytes is None:
            return self
        c = self.candidate
        counts = fewest_recomputed(
            self.order(), self.shape, c.setup, self.known.footprint, self.usable_bytes, c.layers
        )
        return self._with(replace(c, recompute_layers=counts))

    def _with_order(self) -> tuple[Self, Plan]:
        """Choose the forwards ahead, and where weight gradients go that are placed in gaps."""
        c, costs = self.candidate, self.known.costs
        if not (self.auto_ahead or c.places_weight_grads):
            return self, self.order()
        if c.places_weight_grads:
            stage_times(costs)  # or there is nothing to place
        numbers = [c.forwards_ahead]
        if self.auto_ahead:
            numbers = [*worth_trying(costs, c.num_ranks, c.num_microbatches)]
        if self.most_activations is not None:
            check_most(self._plain_order(numbers[0]), self.most_activations)
        choice = choose_order(
            self._plain_order,
            costs,
            self._judged,
            forwards_ahead=numbers,
            places_weight_grads=c.places_weight_grads,
            sizes=self.held_sizes,
            then=self._recomputing,
        )
        found = replace(c, forwards_ahead=choice.forwards_ahead, places_weight_grads=choice.splits)
        return self._with(found), choice.plan

    def _with_replicated(self, order: Plan) -> Self:
        """Choose the segments that every replica steps in full."""
        if not self.auto_replicated:
            return self
        c, whole = self.candidate, self.known.footprint.static_bytes
        peaks = self.peaks(order, self.simulated(order)[1])

        def replicating(segments: Segments) -> PredictedRun:
            return replace(self, candidate=replace(c, replicated=segments))

        def fits(segments: Segments) -> bool:
            if self.usable_bytes is None:
                return True
            static = replicating(segments).known.footprint.static_bytes
            more = (peak + own - old for peak, own, old in zip(peaks, static, whole, strict=True))
            return max(more) <= self.usable_bytes

        found, _ = choose_replicated(
            units(c.num_segments, tied=c.num_ranks > 1 and not getattr(self.shape, "untied", True)),
            lambda segments: replicating(segments).simulated(order)[1].period_s,
            fits,
        )
        return self._with(replace(c, replicated=found))
