"""``fold3d compare``: two training runs, their speed, their losses and where their time went."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron.fold3d.commands import exposure_table
from megatron.fold3d.commands.console import OK, write
from megatron.fold3d.observe.breakdown import exposure_of_ranks, seconds_of, shown_columns
from megatron.fold3d.observe.exposure import Exposure, mean
from megatron.fold3d.observe.report.draw import Pipeline, draw_together
from megatron.fold3d.observe.report.plot import Panel, plot
from megatron.fold3d.observe.runs import (
    Ratio,
    Run,
    compare_losses,
    read_run,
    speed_ratio,
    time_to_loss,
)
from megatron.fold3d.observe.timeline import Timeline
from megatron.fold3d.observe.training_log import Spread

EXAMPLE = "fold3d compare out/demo/stock.log out/demo/aiao.log"

_A_LITTLE_MORE = 1.02


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("first", type=Path, metavar="RUN_A")
    parser.add_argument("second", type=Path, metavar="RUN_B")
    parser.add_argument(
        "--warmup",
        type=int,
        default=3,
        metavar="N",
        help="iterations at the start whose time does not count (default: 3)",
    )
    parser.add_argument(
        "--svg", type=Path, metavar="FILE", help="plot the losses over iterations and over time"
    )
    parser.add_argument(
        "--timelines",
        type=Path,
        metavar="FILE",
        help="draw what the ranks of both did, on one time axis; needs their traces",
    )
    parser.add_argument("--json", action="store_true", help="the result as one JSON object")


def run(args: Namespace) -> int:
    """Print the comparison; returns the exit code."""
    if args.warmup < 0:
        raise ValueError(f"--warmup {args.warmup}: it is zero or more")
    names = _names(args.first, args.second)
    runs = [
        read_run(path, name) for path, name in zip((args.first, args.second), names, strict=True)
    ]
    ratio = _ratio(runs, args.warmup)
    if args.svg:
        args.svg.write_text(_losses_svg(runs), encoding="utf-8")
    if args.timelines:
        args.timelines.write_text(_timelines_svg(runs), encoding="utf-8")
    if args.json:
        write(json.dumps(_as_json(runs, ratio, args.warmup)) + "\n")
    else:
        write("\n".join(_lines(runs, ratio, args.warmup)) + "\n")
    return OK


def _names(first: Path, second: Path) -> tuple[str, str]:
    """Return the parts in which the runs' paths differ."""
    a, b = first.resolve().with_suffix("").parts, second.resolve().with_suffix("").parts
    while a != b and len(a) > 1 and len(b) > 1 and a[-1] == b[-1]:
        a, b = a[:-1], b[:-1]
    return f"A {a[-1]}", f"B {b[-1]}"


def _ratio(runs: Sequence[Run], warmup: int) -> Ratio | None:
    """Return how many times as fast the second run is; None if either has no log."""
    if not all(run.iterations for run in runs):
        return None
    for run in runs:
        if not run.times_s(warmup):
            raise ValueError(
                f"{run.name} ends with iteration {run.iterations[-1].number}, and --warmup "
                f"{warmup} leaves nothing to time; give a smaller --warmup"
            )
    return speed_ratio(runs[0], runs[1], warmup)


def _lines(runs: Sequence[Run], ratio: Ratio | None, warmup: int) -> Iterator[str]:
    width = max(len(run.name) for run in runs)
    if ratio is not None:
        yield f"{'':<{width}}  ms per iteration (quartiles)  samples/s  TFLOP/s per GPU"
        for run in runs:
            speed = _speed(run, warmup)
            numbers = [_number(speed[name]) for name in ("samples_per_s", "tflops_per_gpu")]
            spread = str(Spread.of([s * 1e3 for s in run.times_s(warmup)]))
            yield f"{run.name:<{width}}  {spread:>28}  {numbers[0]:>9}  {numbers[1]:>15}"
        yield (
            f"B is {ratio.value:.3f} times as fast as A, "
            f"95% CI {ratio.low:.3f}-{ratio.high:.3f} (bootstrap)"
        )
        yield ""
        yield from _loss_lines(runs)
    else:
        logless = " and ".join(run.name for run in runs if not run.iterations)
        yield (
            f"no log of {logless}: speed and losses are not compared; write what a run prints to a "
            ".log file in its folder"
        )
    yield ""
    yield from _time_lines(runs, width)


def _loss_lines(runs: Sequence[Run]) -> Iterator[str]:
    agreement = compare_losses(*runs)
    if not agreement.common:
        yield "loss: no iteration has one in both runs"
        return
    yield (
        f"loss: equal in every digit in {agreement.equal} of {agreement.common} iterations"
        + (
            f"; first apart in iteration {agreement.first_difference}, by "
            f"{agreement.largest:.1e} of it at most"
            if agreement.first_difference is not None
            else ""
        )
    )
    reached = _reached(runs)
    if reached is not None:
        loss, (first_s, second_s) = reached
        yield f"loss {loss:.4g} was reached after {first_s:.4g} s by A, {second_s:.4g} s by B"


def _reached(runs: Sequence[Run]) -> tuple[float, tuple[float, float]] | None:
    """The lowest loss that both runs reached, and when each did."""
    curves = [run.loss_over_time() for run in runs]
    if not all(curves):
        return None
    loss = max(min(loss for _, loss in curve) for curve in curves)
    times_s = [time_to_loss(run, loss) for run in runs]
    if times_s[0] is None or times_s[1] is None:
        return None
    return loss, (times_s[0], times_s[1])


def _time_lines(runs: Sequence[Run], width: int) -> Iterator[str]:
    rows = [_exposure(run) for run in runs]
    if rows[0] is None or rows[1] is None:
        yield f"no trace of {_traceless(runs)}: where the time went shows with --trace DIR"
        return
    first, second = rows[0], rows[1]
    shown = shown_columns(first, second)
    width = max(width, len("B - A"))
    times_ms = [[1e3 * s for s in seconds_of(row, shown)] for row in (first, second)]
    gaps_ms = (b - a for a, b in zip(*times_ms, strict=True))
    yield exposure_table.titles(f"{'ms':<{width}}", shown)
    for run, row_ms in zip(runs, times_ms, strict=True):
        yield exposure_table.line(f"{run.name:<{width}}", row_ms)
    signed = [ms if abs(ms) >= 1e-9 else 0.0 for ms in gaps_ms]
    yield exposure_table.line(f"{'B - A':<{width}}", signed, "+.4g")


def _traceless(runs: Sequence[Run]) -> str:
    return " and ".join(run.name for run in runs if run.timeline is None)


def _exposure(run: Run) -> Exposure | None:
    return mean(exposure_of_ranks(run.timeline)) if run.timeline else None


def _speed(run: Run, warmup: int) -> dict[str, float | None]:
    """Means over the iterations after warm-up; None for what the log does not say."""
    rows = [row for row in run.iterations if row.number > warmup]
    samples = [row.batch_size for row in rows if row.batch_size is not None]
    tflops = [row.tflops for row in rows if row.tflops is not None]
    whole = len(samples) == len(rows) and rows
    return {
        "samples_per_s": sum(samples) / sum(run.times_s(warmup)) if whole else None,
        "tflops_per_gpu": fmean(tflops) if tflops else None,
    }


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _losses_svg(runs: Sequence[Run]) -> str:
    if not any(run.losses() for run in runs):
        raise ValueError("--svg: no run has a loss in its log; drop --svg")
    steps = {run.name: [(float(n), loss) for n, loss in run.losses().items()] for run in runs}
    times = {run.name: run.loss_over_time() for run in runs}
    last_s = max(time_s for points in times.values() for time_s, _ in points)
    unit, seconds = ("hours", 3600.0) if last_s > 7200 else ("seconds", 1.0)
    scaled = {name: [(t / seconds, loss) for t, loss in points] for name, points in times.items()}
    return plot(
        "Training loss",
        [Panel("iteration", "loss", steps), Panel(f"{unit} of training", "loss", scaled)],
    )


def _timelines_svg(runs: Sequence[Run]) -> str:
    """Draw both for the time of one steady iteration of the slower run, and a little more."""
    timelines = [run.timeline for run in runs if run.timeline is not None]
    if len(timelines) < len(runs):
        raise ValueError(f"--timelines: no trace of {_traceless(runs)}; train with --trace DIR")
    starts_s = [_steady_from_s(timeline) for timeline in timelines]
    rows = [mean(exposure_of_ranks(timeline)) for timeline in timelines]
    shown_s = _A_LITTLE_MORE * max(row.total_s for row in rows)
    return draw_together(
        [
            Pipeline(
                run.name.partition(" ")[2],
                _caption(row),
                timeline.between(start_s, start_s + shown_s),
            )
            for run, row, timeline, start_s in zip(runs, rows, timelines, starts_s, strict=True)
        ],
        title="Both pipelines on one time axis, measured",
        until_s=shown_s,
    )


def _steady_from_s(timeline: Timeline) -> float:
    """Return when all ranks had ended the first iteration, in s; zero if there is no other."""
    ends = [timeline.iteration_ends_s(rank) for rank in range(timeline.num_ranks)]
    return max(end[0] for end in ends) if all(len(end) > 1 for end in ends) else 0.0


def _caption(row: Exposure) -> str:
    shares = (
        ("bubble", row.bubble_s),
        ("exposed DP.sync", row.grad_sync_s),
        ("exposed PP.sync", row.p2p_s),
    )
    of_it = (f"{what} {row.share(seconds):.0%}" for what, seconds in shares)
    return " · ".join((f"{row.total_s * 1e3:.0f} ms per iteration", *of_it))


def _as_json(runs: Sequence[Run], ratio: Ratio | None, warmup: int) -> dict[str, Any]:
    reached = _reached(runs)
    return {
        "ratio": asdict(ratio) if ratio else None,
        "runs": [
            {
                "name": run.name,
                "iterations": len(run.iterations),
                "times_ms": asdict(Spread.of([s * 1e3 for s in run.times_s(warmup)]))
                if run.times_s(warmup)
                else None,
                **_speed(run, warmup),
                "exposure": asdict(row) if (row := _exposure(run)) else None,
            }
            for run in runs
        ],
        "losses": asdict(compare_losses(*runs)),
        "reached": {"loss": reached[0], "seconds": reached[1]} if reached else None,
    }
