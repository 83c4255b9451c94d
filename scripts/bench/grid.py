"""Compare stock Megatron with ours over layouts, link rates, recompute and clipping.

    sudo .venv/bin/python -m scripts.bench.grid --real-time --logs out/grid

A cell is a job on links of one rate, measured as `scripts.bench.compare` does: in each round every
variant runs once, in turn. Round 1 sweeps stock configurations, and the fastest goes on. Every run
that ends is written to ``LOGS/runs.json``, and runs found there are not done again, so a grid that
was interrupted goes on; ``--table`` only prints what is there.

    sudo .venv/bin/python -m scripts.bench.grid --pipeline-bound --real-time --iterations 2
        --only 'pp=4 x dp=1, m=8, 40%' 'pp=4 x dp=1, m=16, 40%'

measures cells of `scripts.bench.pipeline_cells` instead of `scripts.bench.sync_cells`: deeper
pipelines and slow transfers.

``--slow-down N`` makes layers last N times as long and links N times as slow. The job keeps its
shape, and what ranks on a few cores cost beside it weighs an Nth.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripts.bench import pipeline_cells, sync_cells
from scripts.bench.cells import KeptRuns
from scripts.bench.options import parser_of
from scripts.bench.pipeline_cells import PipelineCell
from scripts.bench.processes import check_real_time
from scripts.bench.runner import Bench, paced, preload
from scripts.bench.summary import Run
from scripts.bench.sync_cells import SyncCell
from scripts.bench.testbed import TestbedError, end_on_signals, refuse
from scripts.bench.variants import Variant

Cell = SyncCell | PipelineCell


class Grid:
    """The runs of all cells, kept in a file."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._kept = KeptRuns(args.logs)

    def measure(self, cell: Cell) -> None:
        """Run what is missing of a cell."""
        for number in range(cell.first_round, self._args.rounds + 1):
            for variant in cell.chosen(number, self.runs(cell)):
                if not variant.name.endswith(tuple(self._args.skip)):
                    key, bench = cell.key(variant, number), self._bench(cell, variant)
                    self._kept.measure(key, bench, variant, number)

    def runs(self, cell: Cell) -> list[Run]:
        """What is known of a cell."""
        runs: list[Run] = []
        for number in range(cell.first_round, self._args.rounds + 1):
            found = (self._kept.find(cell.key(v, number), v) for v in cell.chosen(number, runs))
            runs += [run for run in found if run]
        return runs

    def _bench(self, cell: Cell, variant: Variant) -> Bench:
        warmup, job = cell.warmup(variant), cell.job
        return Bench(
            job=replace(job, num_iterations=warmup + self._args.iterations),
            link=cell.link,
            rank_flags=paced(*cell.layer_ms),
            warmup=warmup,
            real_time=self._args.real_time,
            timeout_s=300.0 * max(1, job.world_size / 4) * max(1, self._args.slow_down),
            logs=self._args.logs,
        )


def main(argv: Sequence[str]) -> int:
    """Measure what is missing, and print the table; 1 if a run failed or losses differ."""
    parser = parser_of(__doc__)
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
    parser.add_argument("--real-time", action="store_true", help="as for compare.py")
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
    if args.pipeline_bound and (args.predictions or args.bounds):
        flag = "--predictions" if args.predictions else "--bounds"
        parser.error(f"{flag} with --pipeline-bound: its table has bounds")
    every: Sequence[Cell] = pipeline_cells.CELLS if args.pipeline_bound else sync_cells.CELLS
    cells: list[Cell] = [
        replace(cell, slow_down=args.slow_down)
        for cell in every
        if any(text in cell.name for text in args.only)
    ]
    if not cells:
        parser.error(f"--only {' '.join(args.only)}: no cell has that in its name")
    if args.list:
        sys.stdout.writelines(f"{cell.name}\n" for cell in cells)
        return 0
    end_on_signals()
    grid = Grid(args)
    try:
        if not (args.table or args.predictions or args.bounds):
            if args.real_time:
                check_real_time("--real-time")
            preload()
            for cell in cells:
                grid.measure(cell)
    except (TestbedError, ValueError) as error:
        return refuse("grid.py", error)
    found: list[Any] = [(cell, grid.runs(cell)) for cell in cells]  # of what the table takes
    if args.predictions or args.bounds:
        table = sync_cells.predictions if args.predictions else sync_cells.bounds_table
        print(table(found))
        return 0
    print((pipeline_cells if args.pipeline_bound else sync_cells).table(found))
    failed = [problem for cell, runs in found for problem in cell.problems(runs)]
    sys.stderr.writelines(f"grid.py: {problem}\n" for problem in failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
