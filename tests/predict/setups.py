"""Estimates and candidates of a split, which many tests make; models and clusters by name."""

from typing import Any

from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.predict.cost_model.cluster import Cluster, cluster
from megatron.fold3d.predict.cost_model.estimate import Estimate, estimate
from megatron.fold3d.predict.cost_model.model_shape import ModelShape, model_shape
from megatron.fold3d.predict.cost_model.sizes import Setup
from megatron.fold3d.predict.search.candidates import Candidate


def estimated(
    shape: str | ModelShape,
    on: str | Cluster,
    setup: Setup,
    ranks: int = 1,
    segments: int = 1,
    **more: Any,
) -> Estimate:
    """What the actions of a split cost."""
    model = model_shape(shape) if isinstance(shape, str) else shape
    gpus = cluster(on) if isinstance(on, str) else on
    return estimate(model, gpus, setup, num_ranks=ranks, num_segments=segments, **more)


def candidate(
    word: str, segments: int, ranks: int, microbatches: int, setup: Setup | None = None, **more: Any
) -> Candidate:
    """A choice in a split, of one replica unless a setup says otherwise."""
    return Candidate(
        choice=Choice.parse(word, segments),
        setup=setup or Setup(),
        num_ranks=ranks,
        num_microbatches=microbatches,
        **more,
    )
