"""The prediction of one run: first each ``auto`` of its flags gets a value, by simulation.

`--check` and `fold3d simulate` both predict runs here.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Self

from megatron.fold3d.observe.memory_curve import memory
from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.plan.memory import peak_activations
from megatron.fold3d.plan.ops import WAYS
from megatron.fold3d.plan.passes.pairs import check_pairs
from megatron.fold3d.plan.passes.place_weight_grads import place_with_equal_times
from megatron.fold3d.plan.schedules import check_sizes
from megatron.fold3d.policy.partition import Layers, best_partition
from megatron.fold3d.predict.cost_model.estimate import Estimate
from megatron.fold3d.predict.cost_model.model_shape import ModelShape
from megatron.fold3d.predict.cost_model.recompute_by_stage import fewest_recomputed
from megatron.fold3d.predict.cost_model.sharded_footprint import sharded_footprint
from megatron.fold3d.predict.search.bounds import rank_times
from megatron.fold3d.predict.search.candidate_timeline import computed, judge_of
from megatron.fold3d.predict.search.candidates import Candidate
from megatron.fold3d.predict.search.descent import Descent, Space, useful_forwards_ahead
from megatron.fold3d.predict.search.judge import Judge, Simulated, stage_times

_MOST_LAYOUTS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRun:
    """A run as a candidate, and the settings that its flags leave open.

    Attributes:
        candidate: the run; `settled` also fills in the order of its job.
        usable_bytes: bytes of a GPU's memory that the run may hold; None if unknown.
        auto_layers: whether to choose the layers of each stage.
        auto_recompute_layers: whether to choose how many layers each stage recomputes.
        auto_ahead: whether to choose the number of forwards ahead.
        auto_replicated: whether to choose the segments that every replica steps in full.
        tied: whether these must include both the first and the last segment, or neither.
    """

    candidate: Candidate
    estimate: Callable[[Candidate], Estimate]
    shape: ModelShape | None = None
    usable_bytes: float | None = None
    auto_layers: bool = False
    auto_recompute_layers: bool = False
    auto_ahead: bool = False
    auto_replicated: bool = False
    tied: bool = False
    how: str = ""

    @property
    def known(self) -> Estimate:
        """The costs and the memory of the candidate."""
        return self.estimate(self.candidate)

    def judge(self, choice: Choice) -> Judge:
        """Return the judge of the run with a choice in place of its own."""
        run = self if choice == self.candidate.choice else self._with(choice=choice)
        return judge_of(
            run.candidate,
            run.known,
            memory_bytes=self.usable_bytes,
            fits=run._fits,
        )

    def simulated(self) -> Simulated:
        """Return the run's plan and its simulated iterations, the last of which is steady."""
        return self.judge(self.candidate.choice).simulated()

    def peaks(self, found: Simulated) -> list[float]:
        """Return the peak bytes of each rank's GPU; an empty list if the model is unknown."""
        if self.shape is None:
            return []
        known, c = self.known, self.candidate
        footprint = known.footprint
        if c.shards != "off":
            footprint = sharded_footprint(footprint, found.plan, known.gradient_bytes, c.setup)
        return [rank.device_peak for rank in memory(found.timeline, footprint)]

    def settled(self) -> Self:
        """Return the run with a value for each open setting, and with its order of computation.

        Raises:
            ValueError: no choice can run, or no choice fits into memory.
        """
        c = self.candidate
        check_sizes(c.num_ranks, c.num_segments, c.num_microbatches)  # before costs of all stages
        run = self._with_layers()._with_counts()._with_choice()
        if run.candidate.choice.pairs:
            check_pairs(run.candidate.job.computed)
        return run

    def _with(self, **changed: Any) -> Self:
        return replace(self, candidate=replace(self.candidate, **changed))

    def _fits(self, found: Simulated) -> bool:
        """Tell whether the run fits into memory; True if the GPU's memory is unknown."""
        if self.usable_bytes is None:
            return True
        return max(self.peaks(found), default=0.0) <= self.usable_bytes

    def _with_layers(self) -> Self:
        if not self.auto_layers or self.shape is None:
            return self
        c, shape = self.candidate, self.shape
        for found, is_open in (
            ("--recompute-layers with numbers", c.recompute_layers),
            ("optimizer=", c.choice.where(optimizer="replicated") or self.auto_replicated),
            ("ahead=auto or wgrad=gaps", c.choice.fills_gaps or self.auto_ahead),
        ):
            if is_open:
                raise ValueError(
                    f"--layers auto with {found}: that is for layers that are known; give numbers "
                    "for --layers, or drop one of the two"
                )

        def iteration_s(layers: Layers) -> float:
            try:
                run = self._with(layers=layers)._with_counts()
            except ValueError:  # not even with all layers recomputed
                return inf
            return run.judge(c.choice).predicted().seconds

        times = None
        are_alike = len({*map(shape.layer_flops, range(shape.num_layers))}) == 1
        if are_alike and not c.choice.pairs:  # a pair takes less than its halves
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
        how = "no split is faster" if best.is_exact else f"the best of {best.simulated} splits"
        return replace(self, candidate=replace(c, layers=best.layers), how=how)

    def _with_counts(self) -> Self:
        """Return the run with the fewest recomputed layers with which it fits into memory."""
        if not self.auto_recompute_layers or self.shape is None or self.usable_bytes is None:
            return self
        c = self.candidate
        order = c.job.order or computed(c)
        counts = fewest_recomputed(
            order, self.shape, c.setup, self.known.footprint, self.usable_bytes, c.layers
        )
        return self._with(recompute_layers=counts)

    def _with_choice(self) -> Self:
        """Search for the open settings of the choice; return the run with its order."""
        first, free = self.candidate.choice, dict[str, tuple[str, ...]]()
        orders = [first]
        if self.auto_ahead:
            c = self.candidate
            numbers = useful_forwards_ahead(self.known.costs, c.num_ranks, c.num_microbatches)
            orders = [replace(first, ahead=number) for number in numbers]
        if first.fills_gaps:
            stage_times(self.known.costs)  # raises if there is nothing to place
            free["wgrad"] = "backward", "gaps"
            order = self.judge(orders[0]).job.computed
            if first.held is not None and max(peak_activations(order)) > first.held:
                # Raises at the first forward that exceeds the limit.
                place_with_equal_times(order.select(way.compute for way in WAYS), first.held)
        if self.auto_replicated:
            free["optimizer"] = "sharded", "replicated"
        if not free and len(orders) == 1:
            return self._with_order(self.candidate.job.computed)
        best = Descent(self.judge, Space(orders=orders, free=free, tied=self.tied)).best
        return self._with(choice=best.choice)._with_order(best.job.computed)

    def _with_order(self, order: Plan) -> Self:
        return self._with(flags=replace(self.candidate.job, order=order))
