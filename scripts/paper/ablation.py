"""What each feature of the paper gains, by systems that have it or not."""

from dataclasses import replace
from itertools import product

from scripts.paper import on_testbed
from scripts.paper.points import A100_39B, TFLOPS, V100_39B, Point, Times, against_megatron, rate
from scripts.paper.results import Grid, Result
from scripts.paper.simulated import iteration
from scripts.paper.systems import SYSTEMS

_CPU = Point(node="cpu", model="8-64-4-32", batch=8, dp=2, pp=2, tp=1, microbatch_size=1)
_QUEUES = "all systems are simulated with a queue per stream; in runs those with preemption have it"


def ablation(times: Times = iteration) -> Result:
    """Systems by name, on the clusters and on CPUs: what each feature of the paper gains."""
    points: dict[str, tuple[Point, dict[str, float]]] = {
        "A100 200 Gb/s": (A100_39B, {"megatron": 88.3, "dspeed3d": 78.3, "fold3d": 116.1}),
        "A100 100 Gb/s": (replace(A100_39B, gigabits=100), {}),
        "V100 100 Gb/s": (V100_39B, {"megatron": 41.2, "fold3d": 51.1}),
    }
    if times is not iteration:
        points |= {"CPU": (_CPU, {}), "testbed 180 Mb/s": (on_testbed.POINT, {})}
    refused = {
        (name, column): reason
        for name, system in SYSTEMS.items()
        for column, (point, _) in points.items()
        if (reason := system.refusal(point.layout))
    }
    rates, gains = [], []
    for name, column in product(SYSTEMS, points):
        if (name, column) in refused:
            continue
        point, known = points[column]
        if not point.on_cpu:
            rates.append(rate(name, column, times, point, name, known.get(name)))
        gain = known[name] / known["megatron"] if name in known else None
        found = against_megatron(name, column, times, point, name, lambda part: 1 / part, gain)
        gains.append(replace(found, is_gain=True))
    grids = (
        Grid(title=TFLOPS, numbers=tuple(rates)),
        Grid(
            title="To megatron",
            numbers=tuple(gains),
            drawn=tuple(points),
            axis="Times as fast as megatron",
        ),
    )
    notes = (f"{name} on {column}: {reason}" for (name, column), reason in refused.items())
    job = "GPT-3 39B with batches of 256 and 128; on CPUs a small GPT"
    return Result(
        name="ablation",
        title="Ablation, systems by name",
        grids=grids,
        notes=(job, _QUEUES, *notes),
    )
