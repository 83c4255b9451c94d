"""The points of an experiment: jobs of the paper, and a system's iteration of one.

An experiment is a function of `Times`, so the same lines make its table of simulations and of runs.
"""

from collections.abc import Callable
from dataclasses import dataclass

from megatron.fold3d.observe.exposure import Exposure
from megatron.fold3d.predict.cost_model.model_shape import ModelShape, model_shape
from megatron.fold3d.predict.cost_model.training_flops import training_flops
from scripts.paper.published_rows import MICROBATCH_SIZE
from scripts.paper.results import Number, Published
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
            on_cpu=self.on_cpu,
        )

    @property
    def on_cpu(self) -> bool:
        """Whether it is a small job that stands in for one of the paper."""
        return self.node in ("cpu", "testbed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """A system's iteration of a point, simulated or measured.

    Attributes:
        parts: seconds by cause, the mean of all ranks.
        quartiles_s: of the iterations of a run; None if it is simulated.
        gpu_bytes: the most that any GPU held in a run.
        host_bytes: activations that a host held for its GPUs in a run.
    """

    parts: Exposure
    quartiles_s: tuple[float, float] | None = None
    gpu_bytes: float | None = None
    host_bytes: float | None = None

    @property
    def total_s(self) -> float:
        """Its seconds; the median, if it is measured."""
        return self.parts.total_s


A100_39B = Point(node="a100", model="gpt3-39b", batch=256, dp=4, pp=4, tp=8)
V100_39B = Point(node="v100", model="gpt3-39b", batch=128, dp=2, pp=4, tp=8)
TFLOPS = "Hardware TFLOP/s of a GPU (1.33 of model TFLOP/s)"
"""The title of what `rate` returns: both ways to count, of which the paper has the first."""
Times = Callable[[Point, str], Iteration | None]
"""A system's iteration of a point; None if it has not run."""


def number(
    row: str,
    column: str,
    found: Iteration | None,
    value: Callable[[float], float],
    published: Published = None,
) -> Number:
    """Return a number that follows from an iteration's seconds, with its spread."""
    if found is None:
        return Number(row, column, None, published)
    spread = None
    if found.quartiles_s:
        one, other = map(value, found.quartiles_s)
        spread = min(one, other), max(one, other)
    return Number(row, column, value(found.total_s), published, spread)


def tflops(point: Point, seconds: float) -> float:
    """Return the TFLOP/s of a GPU, recomputation included, as the paper counts."""
    return flops(point) / seconds / point.gpus / 1e12


def flops(point: Point) -> float:
    """Return the FLOPs of an iteration, recomputation included."""
    return point.batch * training_flops(model_shape(point.model), "full").hardware


def model_share(shape: ModelShape) -> float:
    """Return the model's part of hardware FLOPs; the rest is the recomputed forward."""
    counted = training_flops(shape, "full")
    return counted.model / counted.hardware


def rate(
    row: str, column: str, times: Times, point: Point, name: str, published: Published = None
) -> Number:
    """Return a system's TFLOP/s of a GPU."""
    found = times(point, name)
    return number(row, column, found, lambda seconds: tflops(point, seconds), published)


def against_megatron(
    row: str,
    column: str,
    times: Times,
    point: Point,
    name: str,
    value: Callable[[float], float],
    published: Published,
) -> Number:
    """Return a number that follows from a system's time as part of Megatron's."""
    base, found = times(point, "megatron"), times(point, name)
    if base is None:
        return Number(row, column, None, published)
    return number(row, column, found, lambda seconds: value(seconds / base.total_s), published)


def gain(times: Times, point: Point, over: str = "megatron") -> float | None:
    """Return how many times as fast FOLD3D is; None if one of the two has not run."""
    theirs, ours = times(point, over), times(point, "fold3d")
    return theirs.total_s / ours.total_s if ours and theirs else None
