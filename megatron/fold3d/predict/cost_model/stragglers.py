"""Stragglers: GPUs of one kind differ in speed, and a group is as slow as its slowest GPU.

The model assumes that GPUs' times for the same computation are normally distributed and do not
change. The ranks of a tensor-parallel group wait for each other in every layer, so a group is as
slow as its slowest GPU. DP.sync makes all pipelines wait for the pipeline with the slowest of all
GPUs. This GPU is assumed to be in the stage with the most computation.
"""

from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

from megatron.fold3d.predict.cost_model.cluster import Cluster
from megatron.fold3d.predict.cost_model.sizes import Setup

_NORMAL = NormalDist()
_WIDEST = 8.0  # standard deviations; the tail beyond them is below rounding
_STEPS = 4000


def slowdowns(
    cluster: Cluster, setup: Setup, num_ranks: int, stage_flops: Sequence[float]
) -> tuple[float, ...]:
    """Return, per stage, the slowest pipeline's seconds divided by an average GPU's."""
    sigma = cluster.straggler_sigma
    if not sigma:
        return (1.0,) * len(stage_flops)
    in_step = setup.tensor_parallel * setup.context_parallel
    usual, slowest = (1 + sigma * slowest_of(n) for n in (in_step, cluster.num_gpus))
    work = [sum(stage_flops[rank::num_ranks]) for rank in range(num_ranks)]
    most = work.index(max(work))
    return tuple(
        slowest if stage % num_ranks == most else usual for stage in range(len(stage_flops))
    )


@lru_cache
def slowest_of(n: int) -> float:
    """Return the expected maximum of ``n`` samples of the standard normal distribution.

    This is the integral of 1 - F(x)^n above zero and of -F(x)^n below, by the midpoint rule.
    """
    width = _WIDEST / _STEPS
    middles = [(i + 0.5) * width for i in range(_STEPS)]
    above = sum(1 - _NORMAL.cdf(x) ** n for x in middles)
    below = sum(_NORMAL.cdf(-x) ** n for x in middles)
    return (above - below) * width
