"""Compare stock Megatron with ours over layouts, link rates, recompute and clipping.

    sudo .venv/bin/python -m scripts.bench.grid --real-time --logs out/grid

A cell is one layout at one link rate, measured as `scripts.bench.compare` does: in each round every
variant runs once, in turn. Round 1 sweeps stock configurations, and the fastest goes on. Every run
that ends is written to ``LOGS/runs.json``, and runs found there are not done again, so a grid that
was interrupted goes on; ``--table`` only prints what is there.

    sudo .venv/bin/python -m scripts.bench.grid --pipeline-bound --real-time --iterations 2
        --only 'pp=4 x dp=1, m=8, 40%' 'pp=4 x dp=1, m=16, 40%'

measures cells of `scripts.bench.pipeline_cells` instead: deeper pipelines and slow transfers.

``--slow-down N`` makes layers last N times as long and links N times as slow. The job keeps its
shape, and what ranks on a few cores cost beside it weighs an Nth.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from scripts.bench import bounds, compare, pipeline_cells, predict, summary, variants
from scripts.bench.kept_runs import KeptRuns, problems
from scripts.bench.pipeline_cells import Cell, slower_than
from scripts.bench.processes import RealTimeFlag
from scripts.bench.runner import Bench, preload
from scripts.bench.summary import Row, Run
from scripts.bench.testbed import (
    OFFLOAD_BYTES,
    Link,
    TestbedError,
    end_on_signals,
    parse_rate,
    refuse,
)
from scripts.bench.variants import DEFAULT, Job, Variant, with_parts

_UNCLIPPED = ("--clip-grad", "0")
_NEVER_CLIPS = ("--clip-grad", "1000")  # above every bound here
_MEDIAN = "MEDIAN"  # of the norms in the default's first run
_SOMETIMES_CLIPS = ("--clip-grad", _MEDIAN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A job, and the link rates at which it is measured."""

    num_ranks: int
    data_parallel: int
    recompute: bool
    rates: tuple[str, ...]
    hidden_size: int = 256
    slow_down: float = 1.0

    @property
    def name(self) -> str:
        """As the table has it."""
        recompute = ", recompute" if self.recompute else ""
        slower = slower_than(self.slow_down)
        return f"{slower}pp={self.num_ranks} x dp={self.data_parallel}{recompute}"

    @property
    def layer_ms(self) -> tuple[float, float]:
        """What a layer's forward and backward are paced to."""
        return _FORWARD_MS * self.slow_down, _BACKWARD_MS * self.slow_down

    def rate_bit_s(self, rate: str) -> float | None:
        """Return what a link of that rate has here."""
        rate_bit_s = parse_rate(rate)
        return None if rate_bit_s is None else rate_bit_s / self.slow_down

    def link(self, rate: str) -> Link:
        """Return the link of that rate."""
        rate_bit_s = self.rate_bit_s(rate)
        if rate_bit_s is None:
            return Link()
        return Link(rate_bit_s, queue_ms=_QUEUE_BYTES * 8e3 / rate_bit_s)

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
    Layout(**_TWO, recompute=False, rates=("90mbit", "100mbit", "125mbit", "175mbit", "350mbit")),
    Layout(**_TWO, recompute=True, rates=("70mbit", "135mbit", "325mbit")),
    Layout(**_FOUR, hidden_size=128, recompute=False, rates=("37mbit", "62mbit", "150mbit")),
    Layout(num_ranks=4, data_parallel=1, recompute=False, rates=("90mbit",)),
    Layout(**_FOUR, hidden_size=128, recompute=True, rates=("48mbit",)),
)
_FORWARD_MS, _BACKWARD_MS = 12, 24  # of a layer: four ranks on two cores keep this pace
_QUEUE_BYTES = 8 * OFFLOAD_BYTES  # of a link: where it is shorter, messages beside DP.sync get lost
_WARM_UP = 3  # iterations that are not timed
# The same for flags that are `auto`. Shares hold from the 6th, replicated segments from the 8th,
# what --schedule auto chose from the 10th and orders from the 4th, each after up to five more in
# which the search runs beside the ranks.
_MEASURES_ITSELF = {"-auto-": 12, "-replicate": 13, "chosen-": 15}
_CHOOSES_ITS_ORDER = 9


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
        split = with_parts(order.flags, ":step=next")
        middle = f":wgrad=last@{most // 2 - 1},{most // 2}"
        ours.append(Variant(f"{order.name}-auto-bound", (*split, *_NEVER_CLIPS)))
        ours.append(
            Variant(f"{order.name}-auto-delay", (*with_parts(split, middle), *_NEVER_CLIPS))
        )
        ours.append(Variant(f"{order.name}-auto-noclip", (*split, *_UNCLIPPED)))
        ours.append(Variant(f"{order.name}-auto-sometimes", (*split, *_SOMETIMES_CLIPS)))
        whole = with_parts(distributed.flags, ":optimizer=auto")
        ours.append(Variant(f"{distributed.name}-replicate", whole))
        ours.append(Variant(f"{distributed.name}-delay-replicate", with_parts(whole, middle)))
        group = ("--microbatch-group-size-per-virtual-pipeline-stage", str(job.num_microbatches))
        for run, ending in ((order, ""), (distributed, "-do")):
            chooses = ("--schedule", "auto", *run.flags[2:], *group)
            ours.append(Variant(f"chosen-s{most}{ending}", chooses))
            ours.append(Variant(f"chosen-s{most}{ending}-auto-unclipped", (*chooses, *_UNCLIPPED)))
    return [DEFAULT, *(by_name[name] for name in stock), *ours]


class Grid:
    """The runs of all cells, kept in a file."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._kept = KeptRuns(args.logs)

    def measure(self, layout: Layout) -> None:
        """Run what is missing of a layout."""
        for rate in layout.rates:
            some = chosen(layout.job())
            for number in range(self._args.rounds + 1):
                if number == 2:
                    some = compare.kept(some, self.runs(layout, rate), 1)
                for variant in some:
                    if not variant.name.endswith(tuple(self._args.skip)):
                        key = _key(layout, rate, variant, number)
                        bench = self._bench(layout, rate, variant)
                        self._kept.measure(key, bench, self._at_norm(layout, variant), number)

    def measure_cell(self, cell: Cell) -> None:
        """Run what is missing of a pipeline-bound cell."""
        for number in range(1, self._args.rounds + 1):
            for variant in pipeline_cells.chosen(cell, number, self.runs_of_cell(cell)):
                if not variant.name.endswith(tuple(self._args.skip)):
                    key = f"{cell.name}, {variant.name}, round {number}"
                    self._kept.measure(key, self._bench_of_cell(cell, variant), variant, number)

    def runs(self, layout: Layout, rate: str) -> list[Run]:
        """What is known of a cell; with links that are not shaped all rates are the same."""
        found = (
            self._kept.find(_key(layout, rate, variant, number), variant)
            for number in range(self._args.rounds + 1)
            for variant in chosen(layout.job())
        )
        return [run for run in found if run]

    def runs_of_cell(self, cell: Cell) -> list[Run]:
        """What is known of a pipeline-bound cell."""
        runs: list[Run] = []
        for number in range(1, self._args.rounds + 1):
            for variant in pipeline_cells.chosen(cell, number, runs):
                key = f"{cell.name}, {variant.name}, round {number}"
                if run := self._kept.find(key, variant):
                    runs.append(run)
        return runs

    def _at_norm(self, layout: Layout, variant: Variant) -> Variant:
        flags = tuple(self._median_norm(layout) if f == _MEDIAN else f for f in variant.flags)
        return replace(variant, flags=flags)

    def _median_norm(self, layout: Layout) -> str:
        """Return the norm that half of the default's iterations exceed."""
        default = next((run for run in self.runs(layout, "") if run.variant == DEFAULT), None)
        norms = [i.grad_norm for i in (default.iterations if default else ()) if i.grad_norm]
        if not norms:
            raise ValueError(
                f"{layout.name}: the default's run without shaped links says no gradient norms; "
                f"skip the variants that clip sometimes, or remove it from the kept runs"
            )
        return f"{median(norms):.6g}"

    def _bench(self, layout: Layout, rate: str, variant: Variant) -> Bench:
        found = (count for part, count in _MEASURES_ITSELF.items() if part in variant.name)
        warmup = max(found, default=_WARM_UP)
        return self._of(
            layout.job(warmup + self._args.iterations),
            layout.link(rate),
            layout.layer_ms,
            warmup,
        )

    def _bench_of_cell(self, cell: Cell, variant: Variant) -> Bench:
        warmup = _CHOOSES_ITS_ORDER if "auto" in variant.flags else 2
        return self._of(
            cell.job(warmup + self._args.iterations),
            Link(cell.rate_bit_s, queue_ms=cell.transfer * cell.stage_ms),
            cell.layer_ms,
            warmup,
        )

    def _of(self, job: Job, link: Link, layer_ms: tuple[float, float], warmup: int) -> Bench:
        forward_ms, backward_ms = layer_ms
        return Bench(
            job=job,
            link=link,
            rank_flags=(
                f"--forward-ms={forward_ms}",
                f"--backward-ms={backward_ms}",
                "--nccl-order",
            ),
            warmup=warmup,
            real_time=self._args.real_time,
            timeout_s=300.0 * max(1, job.world_size / 4) * max(1, self._args.slow_down),
            logs=self._args.logs,
        )


def _key(layout: Layout, rate: str, variant: Variant, number: int) -> str:
    return f"{layout.name}, {rate if number else 'unshaped'}, {variant.name}, round {number}"


def table(grid: Grid, layouts: Sequence[Layout]) -> str:
    """Spell all cells as Markdown, a line each."""
    titles = ["layout", "link", "exposed", "stock default", "strongest stock"]
    titles += ["ours, no clip", "bound proves", "and delays", "clips sometimes", "clips"]
    titles += ["clips, replicates", "and delays"]
    titles += [f"auto chooses{what}" for what in ("", ", no clip", ", -do", ", -do, no clip")]
    titles += ["x default", "x strongest", "of the bound"]
    lines = [f"| {' | '.join(titles)} |", "|---|---" + "|--:" * (len(titles) - 2) + "|"]
    for layout in layouts:
        for rate in layout.rates:
            found = summary.rows(grid.runs(layout, rate), layout.rate_bit_s(rate))
            if cells := _cells(found):
                lines.append(f"| {layout.name} | {rate} | {' | '.join(cells)} |")
    return "\n".join(lines)


_ENDINGS = (
    *("noclip", "bound", "auto-delay", "sometimes", "", "do-replicate", "delay-replicate"),
    *("chosen-s8", "chosen-s8-auto-unclipped", "chosen-s8-do", "chosen-s8-do-auto-unclipped"),
)


def _cells(found: Sequence[Row]) -> list[str]:
    """Times in ms; the ratios are those of the fastest of ours, one for each kind that has run."""
    default, strongest = summary.default_stock(found), summary.strongest_stock(found)
    if default is None or strongest is None:
        return []
    exposed = 1 - default.compute_ms / default.spread.median_ms
    ours = [_ours(found, ending) for ending in _ENDINGS]
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
        and (row.variant.name.endswith(ending) if ending else _is_plain(row.variant))
    ]
    return min(rows, key=lambda row: row.spread.median_ms, default=None)


def _is_plain(variant: Variant) -> bool:
    itself = variant.name.endswith("-replicate") or variant.name.startswith("chosen-")
    return "-auto-" not in variant.name and not itself


def _ratios(other: Row, ours: Sequence[Row | None]) -> Iterator[str]:
    return (f"{other.spread.median_ms / row.spread.median_ms:.2f}" for row in ours if row)


def predictions(grid: Grid, layouts: Sequence[Layout]) -> str:
    """Spell what `scripts.bench.predict` says of the cells, beside what was measured there."""
    found: list[predict.Row] = []
    for layout in layouts:
        for rate in layout.rates:
            report = {
                "arguments": arguments(layout, rate),
                "rows": [asdict(row) for row in summary.rows(grid.runs(layout, rate), None)],
            }
            rows = predict.rows(report) if report["rows"] else []
            found += (replace(row, name=f"{rate}, {row.name}") for row in rows)
    return predict.table(found)


def arguments(layout: Layout, rate: str) -> dict[str, str]:
    """Return what `compare` would have been called with, for `predict.Job`."""
    job = layout.job()
    forward_ms, backward_ms = layout.layer_ms
    arguments = {
        "pp": job.num_ranks,
        "dp": job.data_parallel,
        "layers": job.num_layers,
        "hidden": job.hidden_size,
        "seq_length": job.seq_length,
        "micro_batch_size": job.micro_batch_size,
        "microbatches": job.num_microbatches,
        "recompute": job.recompute,
        "untied": job.untied,
        "forward_ms": forward_ms,
        "backward_ms": backward_ms,
        "rate": f"{(layout.rate_bit_s(rate) or 0) / 1e6}mbit",
        "delay_ms": 0,
    }
    return {name: str(value) for name, value in arguments.items()}


def bounds_table(grid: Grid, layouts: Sequence[Layout]) -> str:
    """Spell how much faster than the strongest stock any order can be, and how much ours is."""
    lines = [f"| {' | '.join(bounds.TITLES)} |", "|---" + "|--:" * (len(bounds.TITLES) - 1) + "|"]
    for layout in layouts:
        counts = layout.job().segment_counts
        for rate in layout.rates:
            job = predict.Job.read(arguments(layout, rate))
            cells = bounds.cells(job, counts, grid.runs(layout, rate))
            lines += [f"| {layout.name}, {rate} | {' | '.join(cells)} |"] if cells else []
    return "\n".join(lines)


def _problems(grid: Grid, layouts: Sequence[Layout]) -> Iterator[str]:
    """Yield the runs that failed, and those whose losses are not those of the same clipping."""
    for layout in layouts:
        for rate in layout.rates:
            runs = grid.runs(layout, rate)
            clipped = [run for run in runs if "-auto-" not in run.variant.name]
            sometimes = [run for run in runs if run.variant.name.endswith("-sometimes")]
            unclipped = [run for run in runs if run not in clipped and run not in sometimes]
            for alike in (clipped, sometimes, unclipped):
                yield from problems(f"{layout.name}, {rate}", alike)


def main(argv: Sequence[str]) -> int:
    """Measure what is missing, and print the table; 1 if a run failed or losses differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help='cells, such as "dp=2, 100mbit"'
    )
    parser.add_argument(
        "--pipeline-bound", action="store_true", help="the cells of scripts.bench.pipeline_cells"
    )
    parser.add_argument("--list", action="store_true", help="list the cells and end")
    parser.add_argument("--rounds", type=int, default=3, help="(3)")
    parser.add_argument("--iterations", type=int, default=4, help="of each run that are timed (4)")
    parser.add_argument(
        "--slow-down", type=float, default=1.0, metavar="N", help="of layers and links (1)"
    )
    parser.add_argument("--real-time", action=RealTimeFlag, help="as for compare.py")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    parser.add_argument(
        "--predictions", action="store_true", help="measure nothing; what the simulator says"
    )
    parser.add_argument(
        "--bounds", action="store_true", help="measure nothing; what no order is faster than"
    )
    parser.add_argument("--logs", type=Path, default=Path("out/grid"), help="(out/grid)")
    parser.add_argument(
        "--skip", nargs="+", default=[], metavar="TEXT", help="variants that end so"
    )
    args = parser.parse_args(argv)
    if not 1 <= args.slow_down < math.inf:
        parser.error(f"--slow-down {args.slow_down:g}: it is 1 or more")
    end_on_signals()
    layouts: list[Layout] = []
    cells: list[Cell] = []
    if args.pipeline_bound:
        chosen_cells = (c for c in pipeline_cells.CELLS if any(t in c.name for t in args.only))
        cells = [replace(cell, slow_down=args.slow_down) for cell in chosen_cells]
    else:
        layouts = [
            replace(layout, rates=wanted(layout, args.only), slow_down=args.slow_down)
            for layout in LAYOUTS
        ]
    names = [f"{layout.name}, {rate}" for layout in layouts for rate in layout.rates]
    names += [cell.name for cell in cells]
    if args.pipeline_bound and (args.predictions or args.bounds):
        flag = "--predictions" if args.predictions else "--bounds"
        parser.error(f"{flag} with --pipeline-bound: its table has bounds")
    if not names:
        parser.error(f"--only {' '.join(args.only)}: no cell has that in its name")
    if args.list:
        sys.stdout.writelines(f"{name}\n" for name in names)
        return 0
    grid = Grid(args)
    try:
        if not (args.table or args.predictions or args.bounds):
            preload()
            for layout in layouts:
                grid.measure(layout)
            for cell in cells:
                grid.measure_cell(cell)
    except (TestbedError, ValueError) as error:
        return refuse("grid.py", error)
    if args.predictions or args.bounds:
        text = predictions(grid, layouts) if args.predictions else bounds_table(grid, layouts)
        sys.stdout.write(text + "\n")
        return 0
    by_cell = [(cell, grid.runs_of_cell(cell)) for cell in cells]
    text = pipeline_cells.table(by_cell) if cells else table(grid, layouts)
    sys.stdout.write(text + "\n")
    found = list(_problems(grid, layouts))
    found += [line for cell, runs in by_cell for line in problems(cell.name, runs)]
    sys.stderr.writelines(f"grid.py: {problem}\n" for problem in found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
