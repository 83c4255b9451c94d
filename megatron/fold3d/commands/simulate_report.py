"""How ``fold3d simulate`` shows simulated plans: as text, as JSON, as a picture and as a page."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from shutil import get_terminal_size
from typing import Any

from megatron.fold3d.commands.console import OK, REJECTED, complain, faster, lettered, table
from megatron.fold3d.commands.plan_sizes import in_words, sizes
from megatron.fold3d.commands.training_flags import layout_of
from megatron.fold3d.observe.breakdown import Breakdown, Flops, View, table_ii
from megatron.fold3d.observe.digits import digits, seconds
from megatron.fold3d.observe.exposure import exposure, mean
from megatron.fold3d.observe.report.grid import to_text
from megatron.fold3d.observe.report.page import page
from megatron.fold3d.plan.memory import peak_activations
from megatron.fold3d.predict.cost_model.cluster import Cluster
from megatron.fold3d.predict.search.candidates import flops_of
from megatron.fold3d.predict.search.judge import Simulated
from megatron.fold3d.predict.search.settled import PredictedRun
from megatron.fold3d.predict.simulator.lower_bound import Bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A simulated run, to be shown.

    Attributes:
        peaks: the most bytes that each rank's GPU holds; empty if memory is not known.
        left_out: flags that the simulation ignores.
        layers: of each stage, where they were given or chosen.
    """

    name: str
    run: PredictedRun
    found: Simulated
    peaks: Sequence[float]
    cluster: Cluster | None
    left_out: Sequence[str]
    layers: tuple[int, ...] | None

    @property
    def bounds(self) -> Bounds:
        """What no order of computation beats."""
        known = self.run.known
        return Bounds(self.found.plan, known.costs, known.nic_of_rank)

    @property
    def flops(self) -> Flops | None:
        """The FLOP/s of a GPU; None if there is no model on a cluster."""
        if self.run.shape is None or self.cluster is None:
            return None
        return flops_of(self.run.shape, self.cluster, self.run.candidate, self.found.seconds)

    def lines(self) -> Iterator[str]:
        """Yield the result for a terminal: times, memory, exposure, and the grid if it fits."""
        plan, timeline = self.found.plan, self.found.timeline
        row, iterations = mean(exposure(timeline)), len(timeline.iteration_ends_s(0))
        counts = " ".join(map(str, sizes(plan)["peak_activations"]))
        yield f"{self.name}: {_sizes(self)}"
        if self.layers is not None:
            how = f"  {self.run.how}" if self.run.how else ""
            layout = layout_of(self.layers)
            yield f"layout            --pipeline-model-parallel-layout '{layout}'{how}"
        last = f" (the last of {iterations}; makespan {seconds(timeline.makespan_s)})"
        yield f"iteration         {seconds(timeline.period_s)}{last * (iterations > 1)}"
        yield from _bound_lines(timeline.period_s, self.bounds)
        yield f"peak activations  {counts}  per rank"
        if self.peaks:
            gib = " ".join(f"{b / 2**30:.1f}" for b in self.peaks)
            yield f"peak memory       {gib}  GiB per rank"
        if self.flops is not None:
            yield f"per GPU           {self.flops}"
        yield ""  # the last iteration's parts, mean over ranks, as in the paper's Table II
        titles, [times_s] = table_ii(row)
        shares = (f"{row.share(time_s):.1%}" for time_s in times_s)
        yield from table(
            (
                ("", *titles),
                ("seconds", *map(digits, times_s)),
                ("of iteration", *shares),
            )
        )
        width, height = get_terminal_size(fallback=(100, 24))
        if grid := to_text(timeline, width=width, height=height):
            yield ""
            yield grid.rstrip("\n")
        if self.left_out:
            yield f"not in these estimates: {', '.join(self.left_out)}"

    def as_json(self) -> dict[str, Any]:
        """Return the result for ``--json``."""
        timeline, bounds, flops = self.found.timeline, self.bounds, self.flops
        rows = exposure(timeline)
        row = mean(rows)
        return {
            "name": self.name,
            **sizes(self.found.plan),
            "iterations": len(timeline.iteration_ends_s(0)),
            "makespan_s": timeline.makespan_s,
            "period_s": timeline.period_s,
            "lower_bound_s": bounds.order_s,
            "lower_bound_with_sync_s": bounds.sync_s,
            "lower_bound_with_norm_s": bounds.norm_s,
            "bubble_ratio": row.bubble_ratio,
            "exposure": row.to_dict(),
            "exposure_of_rank": [r.to_dict() for r in rows],
            "peak_bytes": self.peaks or None,
            "flops_per_gpu_s": flops and flops.model,
            "hardware_flops_per_gpu_s": flops and flops.hardware,
            "layers": self.layers,
            "left_out": self.left_out,
        }


def page_of(reports: Sequence[Report]) -> str:
    """Return the page of simulated runs for the browser; it begins with the first."""
    views = views_of(reports)
    most = (max(peak_activations(report.found.plan)) for report in reports)
    lines = (
        f"{view.name}: {_sizes(report)}; at most {held} activations on a rank"
        for view, report, held in zip(views, reports, most, strict=True)
    )
    return page(title_of(reports), "\n".join(lines), views, gain=_gain(reports))


def title_of(reports: Sequence[Report]) -> str:
    """Return the title of a page or a picture: the job, then name and sizes if all runs agree."""
    shape, cluster = reports[0].run.shape, reports[0].cluster
    parts = [f"{shape.name} on {cluster.name}"] if shape and cluster else []
    for of_each in ({report.name for report in reports}, {_sizes(report) for report in reports}):
        parts += of_each if len(of_each) == 1 else ()
    return f"Simulated: {', '.join(parts)}"


def _gain(reports: Sequence[Report]) -> str | None:
    """Return how much faster the first run is than the fastest of stock in its layout."""
    first, *others = reports
    layout = first.run.candidate.layout
    alike = [report for report in others if report.run.candidate.layout == layout]
    stock_s = min((r.found.seconds for r in alike if r.run.candidate.is_stock), default=None)
    return None if stock_s is None else faster(stock_s / first.found.seconds - 1)


def _sizes(report: Report) -> str:
    plan = report.found.plan
    return in_words(plan.num_ranks, plan.num_segments, plan.num_microbatches)


def views_of(reports: Sequence[Report]) -> list[View]:
    """Return runs as a page or a picture shows them; equal names have letters."""
    names = [report.name for report in reports]
    return [
        View(
            name=name,
            timeline=report.found.timeline,
            row=Breakdown(
                of_rank=exposure(report.found.timeline),
                device_bytes=max(report.peaks, default=None),
                flops=report.flops,
            ),
            is_predicted=True,
        )
        for name, report in zip(
            names if len({*names}) == len(names) else lettered(names), reports, strict=True
        )
    ]


def _bound_lines(period_s: float, bounds: Bounds) -> Iterator[str]:
    """Yield the lower bounds, and how much of the iteration the first is."""
    if not bounds.order_s:
        yield "lower bound       0 s"
        return
    share = f"{bounds.order_s / period_s:.1%} of the iteration"
    yield f"lower bound       {seconds(bounds.order_s)}  for any order, without DP.sync: {share}"
    if bounds.sync_s is not None and bounds.norm_s is not None:
        norm = f"{seconds(bounds.norm_s)} if steps wait for the norm"
        yield f"with DP.sync      {seconds(bounds.sync_s)}, or {norm}"


def judge_memory(report: Report) -> int:
    """Return the exit code; complain if a rank needs more memory than its GPU has, or nearly."""
    try:
        remark = report.cluster.remark_on_memory(report.peaks) if report.cluster else ""
    except ValueError as error:
        complain(str(error))
        return REJECTED
    if remark:
        complain(remark)
    return OK
