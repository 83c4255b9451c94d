"""What it costs that every replica steps some segments in full, with the distributed optimizer."""

from collections.abc import Container
from dataclasses import replace

from megatron.fold3d.plan.ir import stages_of
from megatron.fold3d.plan.schedule_word import Segments
from megatron.fold3d.predict.cost_model.estimate import Estimate
from megatron.fold3d.predict.cost_model.model_shape import ModelShape, Split
from megatron.fold3d.predict.cost_model.sizes import Setup, replicated_bytes
from megatron.fold3d.predict.simulator.costs import Costs


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
