"""Failures and checkpoints: which part of a job's time is progress, and how often to write.

After Young (1974) and Daly, "A higher order estimate of the optimum checkpoint interval for restart
dumps" (2006). Symbols: M mean time between failures of the job, delta seconds to write a
checkpoint, R seconds to restart, tau seconds of training between two checkpoints. Failures come
independently of each other, and may come while a checkpoint is written or the job restarts.
"""

from dataclasses import dataclass
from math import exp, expm1, inf, sqrt

from megatron.fold3d.predict.cost_model.cluster import Cluster
from megatron.fold3d.predict.cost_model.model_shape import ModelShape
from megatron.fold3d.predict.cost_model.sizes import Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The share of a job's time that is progress, and the quantities behind it."""

    share: float
    """The share of the time that is progress."""
    failures_s: float
    """Mean time between failures of the whole job."""
    checkpoint_s: float
    """Time for which training stops while a checkpoint is written."""
    interval_s: float
    """Training between two checkpoints."""
    restart_s: float


def goodput(
    shape: ModelShape, cluster: Cluster, setup: Setup, interval_s: float | None = None
) -> Goodput | None:
    """Return the part of its time in which a job makes progress; None where nothing fails.

    Args:
        shape: the model.
        cluster: all of its GPUs are used.
        setup: how it is trained; its precision says how large a checkpoint is.
        interval_s: time of training between two checkpoints; None is Daly's interval.
    """
    if not cluster.gpu_mtbf_s:
        return None
    failures_s = cluster.gpu_mtbf_s / cluster.num_gpus
    kept_bytes = shape.num_parameters * (setup.element_bytes + setup.optimizer_bytes)
    checkpoint_s = kept_bytes / cluster.storage_bytes_per_s
    if interval_s is None:
        interval_s = daly_interval_s(failures_s, checkpoint_s)
    return Goodput(
        share=progress(failures_s, checkpoint_s, cluster.restart_s, interval_s),
        failures_s=failures_s,
        checkpoint_s=checkpoint_s,
        interval_s=interval_s,
        restart_s=cluster.restart_s,
    )


def daly_interval_s(failures_s: float, checkpoint_s: float) -> float:
    """Return the interval with nearly the most progress (Daly eq. 37).

    Its first term, sqrt(2 delta M), is Young's.
    """
    if checkpoint_s >= 2 * failures_s:
        return failures_s
    ratio = sqrt(checkpoint_s / (2 * failures_s))
    young_s = sqrt(2 * checkpoint_s * failures_s)
    return young_s * (1 + ratio / 3 + ratio**2 / 9) - checkpoint_s


def progress(failures_s: float, checkpoint_s: float, restart_s: float, interval_s: float) -> float:
    """Return tau / (M e^(R/M) (e^((tau + delta)/M) - 1)), the share of time that is progress."""
    try:
        spent_s = failures_s * exp(restart_s / failures_s)
        spent_s *= expm1((interval_s + checkpoint_s) / failures_s)
    except OverflowError:
        spent_s = inf
    return interval_s / spent_s
