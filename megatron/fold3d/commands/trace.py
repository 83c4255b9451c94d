"""``fold3d trace``: what a traced run spent its time on, as a table, a page and a Perfetto file."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

from megatron.fold3d.commands.console import OK, complain, table, write
from megatron.fold3d.commands.cost_sources import costs_from
from megatron.fold3d.commands.plan_sizes import in_words
from megatron.fold3d.observe.breakdown import Breakdown, View, exposure_of_ranks, measured, table_ii
from megatron.fold3d.observe.digits import milliseconds
from megatron.fold3d.observe.report.chrome import to_chrome
from megatron.fold3d.observe.report.page import page
from megatron.fold3d.observe.timeline import Timeline
from megatron.fold3d.observe.trace_files import CLOCKS, RankTrace, pipeline, read_ranks
from megatron.fold3d.observe.trace_timeline import to_timeline
from megatron.fold3d.plan.ir import Plan, PlanError, carried
from megatron.fold3d.predict.simulator.link import sends_stock_waits_for
from megatron.fold3d.predict.simulator.replay import (
    as_synced,
    checked_size,
    observed_costs,
    observed_plan,
    replay,
)

EXAMPLE = "fold3d trace out/trace"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="what --trace wrote")
    parser.add_argument(
        "--pipeline", type=int, default=0, help="which of them (default: 0, the first)"
    )
    parser.add_argument("--html", type=Path, help="the page (default: DIR/timeline.html)")
    parser.add_argument("--chrome", type=Path, help="for Perfetto (default: DIR/perfetto.json)")
    parser.add_argument(
        "--costs",
        type=Path,
        help="simulate with these and not with what was measured",
    )
    parser.add_argument("--json", action="store_true", help="the table as one JSON object")
    parser.add_argument(
        "--peak-tflops", type=float, metavar="T", help="of one GPU, for utilisation"
    )


def run(args: Namespace) -> int:
    """Print the table and write the files; returns the exit code."""
    if (peak := args.peak_tflops) is not None and not 0 < peak < inf:
        raise ValueError(f"--peak-tflops {peak}: it is above zero")
    if args.pipeline < 0:
        raise ValueError(f"--pipeline {args.pipeline}: the first is 0")
    ranks = read_ranks(args.folder)
    chosen = pipeline(ranks, args.pipeline)
    timeline = to_timeline(chosen)
    if not timeline.makespan_s:
        raise ValueError(f"{args.folder}: the ranks have no iteration in common; trace again")
    row = _measured(timeline, ranks, peak)
    views = [View(name="measured", timeline=timeline, row=row)]
    try:
        simulated = _simulated(timeline, chosen, args.costs)
    except PlanError as error:  # an order that was cut off, or one with steps the plan lacks
        complain(f"not simulated: {error}")
    else:
        row = Breakdown(of_rank=exposure_of_ranks(simulated))
        views.append(View(name="simulated", timeline=simulated, row=row, is_predicted=True))
    html = args.html or args.folder / "timeline.html"
    chrome = args.chrome or args.folder / "perfetto.json"
    html.write_text(page(_title(chosen[0]), _caption(chosen, ranks), views), encoding="utf-8")
    chrome.write_text(to_chrome({view.name: view.timeline for view in views}), encoding="utf-8")
    if args.json:
        write(json.dumps({view.name: _as_json(view.row) for view in views}) + "\n")
    else:
        lines = [*_lines(_title(chosen[0]), views), "", f"page      {html}", f"Perfetto  {chrome}"]
        write("\n".join(lines) + "\n")
    return OK


def _measured(timeline: Timeline, ranks: Sequence[RankTrace], peak: float | None) -> Breakdown:
    """Return the row of the measured pipeline."""
    row = measured(ranks, timeline)
    if peak is None:
        return row
    if row.flops is None:
        raise ValueError(
            f"--peak-tflops {peak}: the trace has no GPU, or a model whose FLOPs are not known; "
            "drop it"
        )
    return replace(row, utilisation=row.flops.model / (peak * 1e12))


def _simulated(timeline: Timeline, chosen: Sequence[RankTrace], costs: Path | None) -> Timeline:
    """Simulate the plan that ran or, under Megatron's own schedule, the order that was observed."""
    if chosen[0].plan:
        plan = checked_size(Plan.from_text(chosen[0].plan))
        if not any(map(carried, plan.programs)):
            plan = as_synced(plan, timeline)
    else:
        plan = observed_plan(timeline)
    if costs is None:  # a trace does not know whether messages fit into the buffers of rings
        known = replace(observed_costs(timeline, plan), rings_are_buffered=True)
    else:
        known = costs_from(costs, plan.num_stages)
    is_stock = chosen[0].schedule == "stock"
    waited_for = sends_stock_waits_for(plan.num_segments) if is_stock else frozenset()
    iterations = len(timeline.iteration_ends_s(0))
    return replay(plan, known, iterations, sends_waited_for=waited_for)


def _title(rank: RankTrace) -> str:
    sizes = in_words(rank.num_ranks, rank.num_segments, rank.num_microbatches)
    return f"{rank.schedule}: {sizes}"


def _caption(chosen: Sequence[RankTrace], ranks: Sequence[RankTrace]) -> str:
    common = set.intersection(*({row.iteration for row in rank.iterations} for rank in chosen))
    first, *rest = sorted(common)
    which = f"Iteration {first}"
    if rest:
        counted = f"{rest[0]} to {rest[-1]}" if len(rest) > 1 else f"{rest[0]}"
        which = f"Iterations {first} to {rest[-1]} (the times are of {counted})"
    place = f"replica {chosen[0].dp_rank}, tensor-parallel rank {chosen[0].tp_rank}"
    if any(rank.cp_rank for rank in ranks):
        place += f", context-parallel rank {chosen[0].cp_rank}"
    return (
        f"{which} of the pipeline of {place}; {len(ranks)} ranks in all. "
        f"Simulated: the same order, with what its actions took. Times: {CLOCKS[chosen[0].clock]}."
    )


def _lines(title: str, views: Sequence[View]) -> Iterator[str]:
    yield title
    yield ""
    titles, times_s = table_ii(*(view.row.iteration for view in views))
    rows = [("ms", *titles)]
    for view, of_view in zip(views, times_s, strict=True):
        shares = (f"{view.row.iteration.share(time_s):.1%}" for time_s in of_view)
        rows += [(view.name, *map(milliseconds, of_view)), ("of iteration", *shares)]
    yield from table(rows)
    row = views[0].row
    yield ""
    if row.device_bytes is not None:
        yield f"GPU memory   {row.device_bytes / 2**30:.1f} GiB at peak, of the fullest GPU"
    if row.host_bytes is not None:
        yield f"host memory  {row.host_bytes / 2**30:.1f} GiB at peak, of the largest process"
    if row.offloaded_bytes is not None:
        gib = row.offloaded_bytes / 2**30
        yield f"offloaded    {gib:.3g} GiB per iteration, by the process that offloads most"
    for name, sync_s in (("TP.sync", row.tp_sync_s), ("EP.sync", row.ep_sync_s)):
        if sync_s is not None:
            yield (
                f"{name}      {1e3 * sync_s:.1f} ms under way in an iteration, "
                f"{sync_s / row.iteration.total_s:.1%}, inside forwards and backwards"
            )
    if row.deferred_share is not None:
        share = row.deferred_share
        yield f"deferred     {share:.1%} of the gradients, reduced behind the next forward"
    if row.flops is not None:
        used = f", {row.utilisation:.1%} of peak" if row.utilisation is not None else ""
        yield f"per GPU      {row.flops}{used}"


def _as_json(row: Breakdown) -> dict[str, object]:
    return {
        **row.iteration.to_dict(),
        "of_rank": [of_rank.to_dict() for of_rank in row.of_rank],
        "device_bytes": row.device_bytes,
        "host_bytes": row.host_bytes,
        "flops_per_gpu_s": row.flops and row.flops.model,
        "hardware_flops_per_gpu_s": row.flops and row.flops.hardware,
        "utilisation": row.utilisation,
        "offloaded_bytes": row.offloaded_bytes,
        "deferred_share": row.deferred_share,
        "tp_sync_s": row.tp_sync_s,
        "ep_sync_s": row.ep_sync_s,
    }
