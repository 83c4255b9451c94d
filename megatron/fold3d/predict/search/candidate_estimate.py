"""The costs and the memory of a candidate, from a model and a cluster."""

from collections.abc import Callable

from megatron.fold3d.observe.breakdown import Flops
from megatron.fold3d.predict.cost_model.cluster import Cluster
from megatron.fold3d.predict.cost_model.estimate import Estimate, estimate
from megatron.fold3d.predict.cost_model.model_shape import ModelShape
from megatron.fold3d.predict.cost_model.training_flops import training_flops
from megatron.fold3d.predict.search.candidates import Candidate


def estimate_of(
    shape: ModelShape,
    cluster: Cluster,
    candidate: Candidate,
    of_sizes: Callable[..., Estimate] = estimate,
) -> Estimate:
    """Return the estimate of a candidate.

    Args:
        of_sizes: `estimate`, or the same from a cache.
    """
    c = candidate
    return of_sizes(
        shape,
        cluster,
        c.setup,
        num_ranks=c.num_ranks,
        num_segments=c.num_segments,
        layers=c.layers,
        recompute_layers=c.recompute_layers,
        replicated=c.choice.stages(c.num_ranks, optimizer="replicated"),
    )


def flops_of(
    shape: ModelShape, cluster: Cluster, candidate: Candidate, iteration_s: float
) -> Flops:
    """Return the FLOP/s of a GPU while a candidate trains."""
    c, setup = candidate, candidate.setup
    split = c.layers or c.num_ranks * c.num_segments
    each = training_flops(shape, setup.recompute, split, c.recompute_layers)
    batch = setup.microbatch_size * setup.data_parallel * c.num_microbatches
    return each.times(batch / iteration_s / cluster.num_gpus)
