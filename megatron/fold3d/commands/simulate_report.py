"""How ``fold3d simulate`` shows a simulated plan: as text, and as one JSON object."""

from collections.abc import Iterator
from shutil import get_terminal_size
from typing import Any

from megatron.fold3d.commands import exposure_table
from megatron.fold3d.commands.console import OK, REJECTED, complain
from megatron.fold3d.commands.cost_options import Hardware
from megatron.fold3d.commands.plan_source import in_words, sizes
from megatron.fold3d.commands.training_flags import layout_of
from megatron.fold3d.observe.breakdown import Flops, seconds_of, shown_columns
from megatron.fold3d.observe.exposure import Exposure, exposure, mean
from megatron.fold3d.observe.report.grid import to_text
from megatron.fold3d.observe.timeline import Lane, Timeline
from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.predict.simulator.lower_bound import Bounds


def report_lines(
    name: str,
    plan: Plan,
    timeline: Timeline,
    peaks: list[float],
    bounds: Bounds,
    flops: Flops | None,
) -> Iterator[str]:
    """Yield the result for a terminal: times, memory, exposure, and the grid if it fits."""
    row, iterations = mean(exposure(timeline)), len(timeline.iteration_ends_s(0))
    counts = " ".join(map(str, sizes(plan)["peak_activations"]))
    yield f"{name}: {in_words(plan.num_ranks, plan.num_segments, plan.num_microbatches)}"
    last = f" (the last of {iterations}; makespan {timeline.makespan_s:.6g} s)"
    yield f"iteration         {timeline.period_s:.6g} s{last * (iterations > 1)}"
    yield from _bound_lines(timeline.period_s, bounds)
    yield f"bubble            {row.bubble_ratio:.1%} of computation"
    yield f"peak activations  {counts}  per rank"
    if peaks:
        yield f"peak memory       {' '.join(f'{b / 2**30:.1f}' for b in peaks)}  GiB per rank"
    if flops is not None:
        yield f"per GPU           {flops}"
    yield ""
    yield from _table(row)
    if grid := _grid(timeline):
        yield ""
        yield grid


def _bound_lines(period_s: float, bounds: Bounds) -> Iterator[str]:
    """Yield the lower bounds, and how far the iteration is from the first."""
    if not bounds.order_s:
        yield "lower bound       0 s"
        return
    times = f"{period_s / bounds.order_s:.2f} x of it"
    yield f"lower bound       {bounds.order_s:.6g} s  of any order, without DP.sync: {times}"
    if bounds.sync_s is not None:
        norm = f"{bounds.norm_s:.6g} s if steps wait for the norm"
        yield f"with DP.sync      {bounds.sync_s:.6g} s, or {norm}"


def layout_lines(layers: tuple[int, ...] | None, how: str) -> Iterator[str]:
    """Yield the flag of training for layers that were given or chosen, and how they were."""
    if layers is not None:
        chosen = f"  {how}" if how else ""
        yield f"layout            --pipeline-model-parallel-layout '{layout_of(layers)}'{chosen}"


def _table(row: Exposure) -> Iterator[str]:
    """Yield the parts of the last iteration, mean over ranks, as in the paper's Table II."""
    shown = shown_columns(row)
    times_s = seconds_of(row, shown)
    yield exposure_table.titles("         ", shown)
    yield exposure_table.line("seconds  ", times_s)
    yield exposure_table.line("share    ", map(row.share, times_s), ".1%")


def _grid(timeline: Timeline) -> str:
    """Return the computations as text if that fits the terminal."""
    width, height = get_terminal_size(fallback=(100, 24))
    lanes = [timeline.lane(rank, Lane.COMPUTE) for rank in range(timeline.num_ranks)]
    shortest_s = min((s.duration_s for spans in lanes for s in spans if s.duration_s), default=0.0)
    if not shortest_s or timeline.makespan_s / shortest_s > width * height:
        return ""
    text = to_text(timeline, width=width).rstrip("\n")
    return text if text.count("\n") < height else ""


def report_json(
    name: str,
    plan: Plan,
    timeline: Timeline,
    peaks: list[float],
    bounds: Bounds,
    flops: Flops | None,
) -> dict[str, Any]:
    """Return the result for ``--json``."""
    rows = exposure(timeline)
    row = mean(rows)
    return {
        "name": name,
        **sizes(plan),
        "iterations": len(timeline.iteration_ends_s(0)),
        "makespan_s": timeline.makespan_s,
        "period_s": timeline.period_s,
        "lower_bound_s": bounds.order_s,
        "lower_bound_with_sync_s": bounds.sync_s,
        "lower_bound_with_norm_s": bounds.norm_s,
        "bubble_ratio": row.bubble_ratio,
        "exposure": row.to_dict(),
        "exposure_of_rank": [r.to_dict() for r in rows],
        "peak_bytes": peaks or None,
        "flops_per_gpu_s": flops and flops.model,
        "hardware_flops_per_gpu_s": flops and flops.hardware,
    }


def judge_memory(hardware: Hardware, timeline: Timeline, peaks: list[float]) -> int:
    """Return the exit code; complain if a rank needs more memory than its GPU has."""
    limit = hardware.usable_bytes
    if max(peaks) <= limit:
        return OK
    complain(
        f"rank {peaks.index(max(peaks))} needs {max(peaks) / 2**30:.1f} GiB, a GPU of "
        f"{hardware.cluster.name} has {limit / 2**30:.1f} to use; {hardware.nearest_fit(timeline)}"
    )
    return REJECTED
