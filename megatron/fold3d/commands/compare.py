"""``fold3d compare``: training runs, their speed, their losses and where their time went."""

import json
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from megatron.fold3d.commands.console import (
    OK,
    complain,
    faster,
    faster_between,
    lettered,
    table,
    write,
)
from megatron.fold3d.commands.pictures import NO_PICTURE, plot_losses
from megatron.fold3d.commands.timeline_picture import draw
from megatron.fold3d.observe.breakdown import Breakdown, View, table_ii
from megatron.fold3d.observe.digits import milliseconds
from megatron.fold3d.observe.exposure import Exposure
from megatron.fold3d.observe.report.page import page
from megatron.fold3d.observe.runs import (
    Ratio,
    Run,
    check_same_job,
    compare_losses,
    read_run,
    runs_in,
    speed_ratios,
)
from megatron.fold3d.observe.training_log import Spread

_SAME_LAYOUT = "stock, same layout"
ARMS = {
    "yours": "yours",
    "stock-same-layout": _SAME_LAYOUT,
    "stock-any-layout": "stock, any layout",
    "search": "search",
    "auto": "auto",
}
"""The arms of `compare.sbatch`, by the names of their folders without the leading number."""
EXAMPLE = "fold3d compare runs/default runs/tuned runs/auto --html comparison.html"

_SPEEDS = {
    "samples_per_s": "samples/s",
    "tflops_per_gpu": "model TFLOP/s per GPU",
    "hardware_tflops_per_gpu": "hardware TFLOP/s",
    "gpu_gib": "GPU GiB",
    "host_gib": "host GiB",
}


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="or one folder of runs")
    parser.add_argument(
        "--warmup",
        type=int,
        default=3,
        help="how many iterations at the start are not timed (default: 3); at least those in which "
        "--schedule auto chooses",
    )
    parser.add_argument("--svg", type=Path, help="plot the losses over iterations and over time")
    parser.add_argument(
        "--timelines",
        type=Path,
        help="draw what the ranks of all runs did, on one time axis; needs their traces",
    )
    parser.add_argument("--html", type=Path, help="a page with all of it; needs their traces")
    parser.add_argument("--json", action="store_true", help="the result as one JSON object")


def run(args: Namespace) -> int:
    """Print the comparison; returns the exit code."""
    if args.warmup < 0:
        raise ValueError(f"--warmup {args.warmup}: it is zero or more")
    paths = args.runs
    if len(paths) == 1:
        paths, unfinished = runs_in(paths[0])
        if unfinished:
            complain(unfinished)
    runs = [
        read_run(path, name, args.warmup) for path, name in zip(paths, _names(paths), strict=True)
    ]
    check_same_job(runs)
    for each in runs:
        if each.warmup > args.warmup:
            complain(
                f"{each.name} is timed from iteration {each.warmup + 1} on: --schedule auto chose "
                "until then"
            )
    if len(args.runs) == 1 and args.svg is None and any(run.losses() for run in runs):
        if find_spec("matplotlib") is None:
            complain(NO_PICTURE)
        else:
            args.svg = args.runs[0] / "losses.svg"
    ratios = _ratios(runs)
    if args.svg:
        args.svg.write_bytes(_losses_svg(runs))
    if args.timelines:
        args.timelines.write_bytes(timelines_svg(runs, ratios))
    if args.html:
        args.html.write_text(timelines_page(runs, ratios), encoding="utf-8")
    if args.json:
        write(json.dumps(_as_json(runs, ratios)) + "\n")
        return OK
    written: dict[str, Path | None] = {
        "losses": args.svg,
        "timelines": args.timelines,
        "page": args.html,
    }
    if ratios and len(args.runs) == 1:
        fastest = max(runs, key=lambda run: median(1 / s for s in run.times_s))
        flags = paths[runs.index(fastest)] / "flags"
        written[f"flags of {fastest.name}, the fastest"] = flags if flags.exists() else None
    files = [f"{what:<10} {file}" for what, file in written.items() if file]
    write("\n".join((*_lines(runs, ratios), *([""] if files else ()), *files)) + "\n")
    return OK


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the last parts in which the runs' paths differ, with a letter before each."""
    parts = [path.resolve().with_suffix("").parts for path in paths]
    while (
        any(a != b for a, b in pairwise(parts))
        and min(map(len, parts)) > 1
        and len({of_path[-1] for of_path in parts}) == 1
    ):
        parts = [of_path[:-1] for of_path in parts]
    names = [of_path[-1] for of_path in parts]
    return lettered(ARMS.get(re.sub(r"^\d+-", "", name), name) for name in names)


def _ratios(runs: Sequence[Run]) -> Sequence[Ratio]:
    """Compare the runs' speed; nothing if one of them has no log."""
    if not all(run.iterations for run in runs):
        return ()
    for run in runs:
        if not run.timed:
            raise ValueError(
                f"{run.name} ends with iteration {run.iterations[-1].number}, and the first "
                f"{run.warmup} are not timed; give a smaller --warmup, or train longer"
            )
    return speed_ratios(runs)


def _lines(runs: Sequence[Run], ratios: Sequence[Ratio]) -> Iterator[str]:
    if ratios:
        yield from speed_lines(runs, ratios)
        yield ""
        yield loss_line(runs)
    else:
        logless = _all_of([run.name for run in runs if not run.iterations])
        yield (
            f"no log of {logless}: speed and losses are not compared; write what a run prints to a "
            ".log file in its folder"
        )
    yield ""
    yield from time_lines(runs)


def speed_lines(runs: Sequence[Run], ratios: Sequence[Ratio]) -> Iterator[str]:
    """Yield the table of speeds, and the verdict."""
    yield from table(_speed_table(runs, ratios))
    said = verdict(runs, ratios)
    yield said + (" (bootstrap)" if "95% CI" in said else "")


def verdict(runs: Sequence[Run], ratios: Sequence[Ratio]) -> str:
    """Return one sentence that compares the last run with the one that it has to beat."""
    if any(run.shares_cores for run in runs):
        return "No verdict: ranks shared the cores of one machine, without a network between"
    number = _baseline(runs, ratios)
    ratio, other, last = ratios[number], runs[number].name, runs[-1].name
    gain, low, high = (faster(ratio.value - 1), ratio.low - 1, ratio.high - 1)
    interval = f"95% CI {faster_between(low, high)}"
    if low > 0 or high < 0:
        return f"{last} is {gain} than {other}, {interval}"
    return f"No difference shown between {last} and {other}: {gain}, {interval}"


def _baseline(runs: Sequence[Run], ratios: Sequence[Ratio]) -> int:
    """Return the number of the run of stock in the same layout or, without one, of the fastest."""
    for number, run in enumerate(runs[:-1]):
        if run.name.endswith(_SAME_LAYOUT):
            return number
    return min(range(len(ratios)), key=lambda number: ratios[number].value)


def _speed_table(runs: Sequence[Run], ratios: Sequence[Ratio]) -> Iterator[tuple[str, ...]]:
    """Yield titles, and a row for each run; columns that no log fills are left out."""
    speeds = [_speed(run) for run in runs]
    known = {
        title: texts
        for name, title in _SPEEDS.items()
        if any(texts := ["" if (n := s[name]) is None else f"{n:.4g}" for s in speeds])
    }
    last = runs[-1].name
    yield "", "ms per iteration (quartiles)", *known, f"{last} is (95% CI)"
    gains = [
        f"{faster(ratio.value - 1)} ({faster_between(ratio.low - 1, ratio.high - 1)})"
        for ratio in ratios
    ]
    for i, (run, gain) in enumerate(zip(runs, [*gains, ""], strict=True)):
        spread = str(Spread.of([s * 1e3 for s in run.times_s]))
        yield run.name, spread, *(texts[i] for texts in known.values()), gain


def loss_line(runs: Sequence[Run]) -> str:
    """Say whether all runs have equal losses."""
    agreement = compare_losses(runs)
    if not agreement.common:
        return f"loss: no iteration has one in {'both' if len(runs) == 2 else 'all'} runs"
    told = f"loss: equal in every digit in {agreement.equal} of {agreement.common} iterations"
    if agreement.first_difference is None:
        return told
    return (
        f"{told}; first apart in iteration {agreement.first_difference}, by "
        f"{agreement.largest:.1e} of it at most"
    )


def time_lines(runs: Sequence[Run]) -> Iterator[str]:
    """Yield where the time went, and what the last run spends less or more than the others."""
    if traceless := _traceless(runs):
        yield f"no trace of {traceless}: where the time went shows with --trace DIR"
        return
    titles, times_s = table_ii(*(run.traced.row.iteration for run in runs if run.traced))
    *letters, last = (run.name.partition(" ")[0] for run in runs)
    rows = [("ms", *titles)]
    for run, own_s in zip(runs, times_s, strict=True):
        rows.append((run.name, *map(milliseconds, own_s)))
    for letter, other_s in zip(letters, times_s, strict=False):
        gaps_s = (b - a for a, b in zip(other_s, times_s[-1], strict=True))
        signed = (milliseconds(gap_s if abs(gap_s) >= 1e-12 else 0.0, "+") for gap_s in gaps_s)
        rows.append((f"{last} - {letter}", *signed))
    yield from table(rows)


def _traceless(runs: Sequence[Run]) -> str:
    return _all_of([run.name for run in runs if run.traced is None])


def _all_of(names: Sequence[str]) -> str:
    """Name several in one phrase; nothing if there are none."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def _speed(run: Run) -> dict[str, float | None]:
    """Means over the timed iterations, and peaks; None for what neither log nor trace says."""
    rows = run.timed
    samples = [row.batch_size for row in rows if row.batch_size is not None]
    tflops = [row.tflops for row in rows if row.tflops is not None]
    whole = len(samples) == len(rows) and rows
    traced = run.traced.row if run.traced else Breakdown(of_rank=(Exposure(),))
    model = fmean(tflops) if tflops else None
    hardware = traced.flops and traced.flops.hardware / 1e12
    if traced.flops is not None and model is not None:  # as much more as in the trace
        hardware = model * traced.flops.hardware / traced.flops.model
    return {
        "samples_per_s": sum(samples) / sum(run.times_s) if whole else None,
        "tflops_per_gpu": model or (traced.flops and traced.flops.model / 1e12),
        "hardware_tflops_per_gpu": hardware,
        "gpu_gib": traced.device_bytes and traced.device_bytes / 2**30,
        "host_gib": traced.host_bytes and traced.host_bytes / 2**30,
    }


def _losses_svg(runs: Sequence[Run]) -> bytes:
    if not any(run.losses() for run in runs):
        raise ValueError("--svg: no run has a loss in its log; drop --svg")
    times = {run.name: run.loss_over_time() for run in runs}
    last_s = max(time_s for points in times.values() for time_s, _ in points)
    unit, unit_s = ("hours", 3600.0) if last_s > 7200 else ("seconds", 1.0)
    scaled = {name: [(t / unit_s, loss) for t, loss in points] for name, points in times.items()}
    steps = {run.name: list(run.losses().items()) for run in runs}
    return plot_losses("Training loss", {"iteration": steps, f"{unit} of training": scaled})


def timelines_svg(runs: Sequence[Run], ratios: Sequence[Ratio]) -> bytes:
    """Draw the pipelines of all runs on one time axis."""
    return draw("--timelines", _title(runs, ratios), _views(runs, "--timelines"))


def timelines_page(runs: Sequence[Run], ratios: Sequence[Ratio]) -> str:
    """Return the page of all runs; it begins with the last one."""
    *others, last = _views(runs, "--html")
    table = list(_speed_table(runs, ratios)) if ratios else ()
    caption = loss_line(runs).capitalize() if ratios else ""
    return page(_title(runs, ratios), caption, [last, *others], speeds=table)


def _title(runs: Sequence[Run], ratios: Sequence[Ratio]) -> str:
    return verdict(runs, ratios) if ratios else "All pipelines on one time axis, measured"


def _views(runs: Sequence[Run], flag: str) -> list[View]:
    if traceless := _traceless(runs):
        raise ValueError(f"{flag}: no trace of {traceless}; train with --trace DIR")
    return [run.traced for run in runs if run.traced]


def _as_json(runs: Sequence[Run], ratios: Sequence[Ratio]) -> dict[str, Any]:
    return {
        "verdict": verdict(runs, ratios) if ratios else None,
        "ratio": asdict(ratios[_baseline(runs, ratios)]) if ratios else None,
        "ratios": [asdict(ratio) for ratio in ratios] if ratios else None,
        "runs": [
            {
                "name": run.name,
                "iterations": len(run.iterations),
                "times_ms": asdict(Spread.of([s * 1e3 for s in run.times_s]))
                if run.times_s
                else None,
                **_speed(run),
                "exposure": run.traced.row.iteration._asdict() if run.traced else None,
            }
            for run in runs
        ],
        "losses": asdict(compare_losses(runs)),
    }
