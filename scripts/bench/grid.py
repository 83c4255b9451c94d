"""Compare stock Megatron with ours over layouts, link rates, recompute and clipping.

    sudo .venv/bin/python -m scripts.bench.grid --real-time --logs out/grid

A cell is one layout at one link rate, measured as `scripts.bench.compare` does: in each round every
variant runs once, in turn. Round 1 sweeps stock configurations, and the fastest goes on. Every run
that ends is written to ``LOGS/runs.json``, and runs found there are not done again, so a grid that
was interrupted goes on; ``--table`` only prints what is there.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megatron.fold3d.observe.training_log import Iteration
from scripts.bench import compare, summary, variants
from scripts.bench.runner import Bench, preload
from scripts.bench.summary import Row, Run
from scripts.bench.testbed import Link, TestbedError, end_on_signals, parse_rate, refuse
from scripts.bench.variants import DEFAULT, Job, Variant

_UNCLIPPED = ("--clip-grad", "0")
_NEVER_CLIPS = ("--clip-grad", "1000")  # above every bound here


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A job, and the link rates at which it is measured."""

    num_ranks: int
    data_parallel: int
    recompute: bool
    rates: tuple[str, ...]
    hidden_size: int = 256

    @property
    def name(self) -> str:
        """As the table has it."""
        recompute = ", recompute" if self.recompute else ""
        return f"pp={self.num_ranks} x dp={self.data_parallel}{recompute}"

    def job(self, num_iterations: int = 0) -> Job:
        """The job of the other benchmarks, with clipping as most people have it."""
        return Job(
            num_ranks=self.num_ranks,
            data_parallel=self.data_parallel,
            num_microbatches=8,
            num_layers=16,
            hidden_size=self.hidden_size,
            seq_length=32,
            micro_batch_size=1,
            num_iterations=num_iterations,
            clip_grad=1.0,
            recompute=self.recompute,
        )


# Rates at which stock's default leaves DP.sync exposed for about 45, 30 and 15% of an iteration; at
# 100 Mb/s compute and DP.sync take about as long as each other.
# Eight ranks have smaller layers: two cores cannot compute the others in the paced time.
_TWO, _FOUR = {"num_ranks": 2, "data_parallel": 2}, {"num_ranks": 2, "data_parallel": 4}
LAYOUTS = (
    Layout(**_TWO, recompute=False, rates=("90mbit", "100mbit", "175mbit", "350mbit")),
    Layout(**_TWO, recompute=True, rates=("70mbit", "135mbit", "325mbit")),
    Layout(**_FOUR, hidden_size=128, recompute=False, rates=("37mbit", "62mbit", "150mbit")),
    Layout(num_ranks=4, data_parallel=1, recompute=False, rates=("90mbit",)),
    Layout(**_FOUR, hidden_size=128, recompute=True, rates=("48mbit",)),
)
_FORWARD_MS, _BACKWARD_MS = 12, 24  # of a layer: four ranks on two cores keep this pace
_WARM_UP = 3  # iterations that are not timed
_MEASURES_ITSELF = 7  # the same for `--backward-share auto`, whose shares hold from the 6th


def wanted(layout: Layout, texts: Sequence[str]) -> tuple[str, ...]:
    """Return the rates of a layout whose cells one of the texts is in the name of."""
    cells = {rate: f"{layout.name}, {rate}" for rate in layout.rates}
    return tuple(rate for rate, cell in cells.items() if any(text in cell for text in texts))


def chosen(job: Job) -> list[Variant]:
    """Stock's default, the candidates for its strongest, and ours with and without clipping."""
    by_name = {variant.name: variant for variant in variants.known(job)}
    most = job.segment_counts[-1]
    stock = [f"stock-v{most}-n8-do", f"stock-v{most}-n8", f"stock-v{most // 2}-n8-do"]
    order, distributed = (by_name[f"aiao-s{most}{ending}"] for ending in ("", "-do"))
    ours = [distributed]
    if job.data_parallel == 1 or job.recompute:  # forwards are too short to hide an all-gather
        ours.append(order)
    if job.data_parallel > 1:
        split = (*order.flags, "--backward-share", "auto")
        middle = ("--delay-weight-grads", f"{most // 2 - 1},{most // 2}")
        ours.append(Variant(f"{order.name}-auto-bound", (*split, *_NEVER_CLIPS)))
        ours.append(Variant(f"{order.name}-auto-delay", (*split, *middle, *_NEVER_CLIPS)))
        ours.append(Variant(f"{order.name}-auto-noclip", (*split, *_UNCLIPPED)))
    return [DEFAULT, *(by_name[name] for name in stock), *ours]


class Grid:
    """The runs of all cells, kept in a file."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._file: Path = args.logs / "runs.json"
        self._runs: dict[str, dict[str, object]] = {}
        if self._file.exists():
            self._runs = json.loads(self._file.read_text())

    def measure(self, layout: Layout) -> None:
        """Run what is missing of a layout."""
        for rate in layout.rates:
            some = chosen(layout.job())
            for number in range(self._args.rounds + 1):
                if number == 2:
                    some = compare.kept(some, self.runs(layout, rate), 1)
                for variant in some:
                    if variant.name.endswith(tuple(self._args.skip)):
                        continue
                    self._measure(layout, rate, variant, number)

    def runs(self, layout: Layout, rate: str) -> list[Run]:
        """What is known of a cell; with links that are not shaped all rates are the same."""
        return [
            _read(self._runs[key], variant)
            for number in range(self._args.rounds + 1)
            for variant in chosen(layout.job())
            if (key := _key(layout, rate, variant, number)) in self._runs
        ]

    def _measure(self, layout: Layout, rate: str, variant: Variant, number: int) -> None:
        key = _key(layout, rate, variant, number)
        if key in self._runs and not self._runs[key]["failure"]:
            return
        run = self._bench(layout, rate, variant).run(variant, number)
        what = run.failure or str(sorted(round(ms) for ms in run.times_ms))
        compare.say(f"{key}: {what}")
        self._runs[key] = asdict(replace(run, variant=DEFAULT))
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(self._runs, indent=1))

    def _bench(self, layout: Layout, rate: str, variant: Variant) -> Bench:
        warmup = _MEASURES_ITSELF if "-auto-" in variant.name else _WARM_UP
        return Bench(
            job=layout.job(warmup + self._args.iterations),
            link=Link(parse_rate(rate)),
            rank_flags=(
                f"--forward-ms={_FORWARD_MS}",
                f"--backward-ms={_BACKWARD_MS}",
                "--nccl-order",
            ),
            warmup=warmup,
            real_time=self._args.real_time,
            timeout_s=300.0,
            logs=self._args.logs,
        )


def _key(layout: Layout, rate: str, variant: Variant, number: int) -> str:
    return f"{layout.name}, {rate if number else 'unshaped'}, {variant.name}, round {number}"


def _read(entry: dict[str, object], variant: Variant) -> Run:
    iterations = tuple(Iteration(**values) for values in entry["iterations"])  # type: ignore[attr-defined]
    return Run(**(entry | {"variant": variant, "iterations": iterations}))  # type: ignore[arg-type]


def table(grid: Grid, layouts: Sequence[Layout]) -> str:
    """Spell all cells as Markdown, a line each."""
    titles = ["layout", "link", "exposed", "stock default", "strongest stock"]
    titles += ["ours, no clip", "bound proves", "and delays", "clips", "x default", "x strongest"]
    titles += ["of the bound"]
    lines = [f"| {' | '.join(titles)} |", "|---|---" + "|--:" * (len(titles) - 2) + "|"]
    for layout in layouts:
        for rate in layout.rates:
            found = summary.rows(grid.runs(layout, rate), parse_rate(rate))
            if cells := _cells(found):
                lines.append(f"| {layout.name} | {rate} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells(found: Sequence[Row]) -> list[str]:
    """Times in ms; the ratios are those of the fastest of ours, one for each kind of clipping."""
    default, strongest = summary.default_stock(found), summary.strongest_stock(found)
    if default is None or strongest is None:
        return []
    exposed = 1 - default.compute_ms / default.spread.median_ms
    ours = [_ours(found, ending) for ending in ("noclip", "bound", "delay", "")]
    return [
        f"{exposed:.0%}",
        f"{default.spread.median_ms:.0f}",
        f"{strongest.spread.median_ms:.0f} ({strongest.variant.name.removeprefix('stock-')})",
        *(f"{row.spread.median_ms:.0f}" if row else "-" for row in ours),
        " / ".join(_ratios(default, ours)),
        " / ".join(_ratios(strongest, ours)),
        " / ".join(f"{row.spread.median_ms / row.bound_ms:.2f}" for row in ours if row),
    ]


def _ours(found: Sequence[Row], ending: str) -> Row | None:
    """The fastest of ours that clips as ``ending`` says."""
    rows = [
        row
        for row in found
        if not row.variant.is_stock
        and (row.variant.name.endswith(ending) if ending else "-auto-" not in row.variant.name)
    ]
    return min(rows, key=lambda row: row.spread.median_ms, default=None)


def _ratios(other: Row, ours: Sequence[Row | None]) -> Iterator[str]:
    return (f"{other.spread.median_ms / row.spread.median_ms:.2f}" for row in ours if row)


def _problems(grid: Grid, layouts: Sequence[Layout]) -> Iterator[str]:
    """Yield the runs that failed, and those whose losses are not those of the same clipping."""
    for layout in layouts:
        for rate in layout.rates:
            runs = grid.runs(layout, rate)
            clipped = [run for run in runs if "-auto-" not in run.variant.name]
            unclipped = [run for run in runs if "-auto-" in run.variant.name]
            for alike in (clipped, unclipped):
                for line in summary.loss_disagreements(alike)[1]:
                    yield f"{layout.name}, {rate}: {line}"
            yield from (
                f"{layout.name}, {rate}: {r.variant.name}: {r.failure}" for r in runs if r.failure
            )


def main(argv: Sequence[str]) -> int:
    """Measure what is missing, and print the table; 1 if a run failed or losses differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help='cells, such as "dp=2, 100mbit"'
    )
    parser.add_argument("--rounds", type=int, default=3, help="(3)")
    parser.add_argument("--iterations", type=int, default=4, help="of each run that are timed (4)")
    parser.add_argument("--real-time", action="store_true", help="as for compare.py")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    parser.add_argument("--logs", type=Path, default=Path("out/grid"), help="(out/grid)")
    parser.add_argument(
        "--skip", nargs="+", default=[], metavar="TEXT", help="variants that end so"
    )
    args = parser.parse_args(argv)
    end_on_signals()
    layouts = [replace(layout, rates=wanted(layout, args.only)) for layout in LAYOUTS]
    if not any(layout.rates for layout in layouts):
        parser.error(f"--only {' '.join(args.only)}: no cell has that in its name")
    grid = Grid(args)
    try:
        if not args.table:
            preload()
            for layout in layouts:
                grid.measure(layout)
    except (TestbedError, ValueError) as error:
        return refuse("grid.py", error)
    sys.stdout.write(table(grid, layouts) + "\n")
    problems = list(_problems(grid, layouts))
    sys.stderr.writelines(f"grid.py: {problem}\n" for problem in problems)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
