"""What an iteration takes in which every replica steps some segments in full, simulated."""

from collections.abc import Container
from dataclasses import replace

from megatron.fold3d.observe.timeline import Timeline
from megatron.fold3d.plan.compile import Options, lower
from megatron.fold3d.plan.ir import Plan, stages_of
from megatron.fold3d.policy.replicated_segments import Segments
from megatron.fold3d.predict.cost_model.estimate import Estimate
from megatron.fold3d.predict.cost_model.model_shape import ModelShape, Split
from megatron.fold3d.predict.cost_model.sizes import Setup, replicated_bytes
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.execution import Execution
from megatron.fold3d.predict.simulator.routes import NO_SWITCHES, Routes
from megatron.fold3d.predict.simulator.simulate import simulate


def with_replicated(costs: Costs, stages: Container[int]) -> Costs:
    """Return a distributed optimizer's costs where ``stages`` are all-reduced and not gathered.

    A ring's all-reduce is a reduce-scatter and an all-gather of the same bytes.
    """
    return replace(
        costs,
        grad_sync_s=tuple(
            s * (2 if stage in stages else 1) for stage, s in enumerate(costs.grad_sync_s)
        ),
        param_gather_s=tuple(
            0.0 if stage in stages else s for stage, s in enumerate(costs.param_gather_s)
        ),
    )


def estimate_with_replicated(
    known: Estimate,
    shape: ModelShape,
    setup: Setup,
    split: Split,
    segments: Segments,
) -> Estimate:
    """Return the costs and the memory of a pipeline some of whose segments are replicated.

    Args:
        known: the estimate of the pipeline without replicated segments.
        shape: the model.
        setup: how it is trained, with the distributed optimizer.
        split: the model's stages, as in `estimate`.
        segments: the segments that every replica steps in full.
    """
    if not segments:
        return known
    static = known.footprint.static_bytes
    stages = stages_of(segments, len(static))
    more = replicated_bytes(shape, setup, len(static), split, stages)
    static = tuple(map(sum, zip(static, more, strict=True)))
    footprint = replace(known.footprint, static_bytes=static)
    return replace(known, costs=with_replicated(known.costs, stages), footprint=footprint)


class SimulatedIteration:
    """Iterations of an order that wait for all gradients, by what is replicated.

    Args:
        order: the order of computation.
        delayed: segments whose weight gradients are delayed, unless the order has them.
        costs: the costs with a distributed optimizer: reduce-scatters and all-gathers.
        nic_of_rank: as in `Execution`.
        routes: as in `Execution`.
        reduces_early: as in `Options`.
        early: the segments of ``wgrad=behind`` that reduce to shards.
        shard_shares: as in `Execution`.
    """

    def __init__(
        self,
        order: Plan,
        delayed: Segments,
        costs: Costs,
        nic_of_rank: tuple[int, ...] | None = None,
        routes: Routes = NO_SWITCHES,
        *,
        reduces_early: bool = False,
        early: Segments = (),
        shard_shares: tuple[tuple[float, float], ...] = (),
    ) -> None:
        self._order, self._delayed, self._costs = order, delayed, costs
        self._reduces_early = reduces_early
        self._early = stages_of(early, order.num_ranks)
        self._execution = Execution(
            in_order=True,
            preemptive=False,
            nic_of_rank=nic_of_rank,
            routes=routes,
            shard_shares=shard_shares,
        )

    def seconds(self, replicated: Segments) -> float:
        """Return what an iteration takes that replicates some segments, in s."""
        return self.timeline(replicated).period_s

    def timeline(self, replicated: Segments) -> Timeline:
        """Return an iteration in which every replica steps some segments in full."""
        stages = stages_of(replicated, self._order.num_ranks)
        options = Options(
            delay_weight_grads=self._delayed,
            gathers_params=True,
            replicated_stages=stages,
            transfers=False,
            reduces_early=self._reduces_early,
            early_dp_sync=self._early,
        )
        plan = lower(self._order, options)
        return simulate(plan, with_replicated(self._costs, stages), self._execution)
