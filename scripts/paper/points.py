"""The points of an experiment: jobs of the paper, and where the times of systems on them come from.

An experiment is a function of `Times`, so the same lines make its table of simulations and of runs.
"""

from collections.abc import Callable
from dataclasses import dataclass

from megatron.fold3d.observe.exposure import Exposure
from megatron.fold3d.predict.cost_model.model_shape import model_shape
from megatron.fold3d.predict.cost_model.training_flops import training_flops
from scripts.paper.published_rows import MICROBATCH_SIZE
from scripts.paper.systems import Layout

PASSES = 4  # a forward, its recomputation, and a backward of twice the work


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A job of the paper: a model on a cluster in one layout."""

    node: str
    model: str
    batch: int
    dp: int
    pp: int
    tp: int
    segments: int = 4
    gigabits: float | None = None
    """Of a node; None is the cluster's own."""
    microbatch_size: int = MICROBATCH_SIZE

    @property
    def gpus(self) -> int:
        """GPUs of the whole job."""
        return self.dp * self.pp * self.tp

    @property
    def layout(self) -> Layout:
        """What the table of systems has to know."""
        return Layout(
            pipeline_ranks=self.pp,
            segments=self.segments,
            microbatches=self.batch // self.dp // self.microbatch_size,
            sequences=max(1, self.batch // self.gpus),
            fp16=self.node == "v100",
            on_cpu=self.node == "cpu",
        )


Times = Callable[[Point, str], Exposure | None]
"""Where the time of a system's iteration goes, simulated or measured; None if it has not run."""


def tflops(times: Times, point: Point, name: str) -> float | None:
    """Return a system's TFLOP/s per GPU, recomputation included, as the paper counts."""
    found = times(point, name)
    return flops(point) / found.total_s / point.gpus / 1e12 if found else None


def flops(point: Point) -> float:
    """Return the FLOPs of an iteration, recomputation included."""
    return point.batch * training_flops(model_shape(point.model), "full").hardware
