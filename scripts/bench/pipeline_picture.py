"""Draw the pipeline-bound regime: stock's default above one segment with both ``auto``, simulated.

    .venv/bin/python -m scripts.bench.pipeline_picture docs/images/pipeline-bound.svg

The job and the links are those of a cell of `scripts.bench.pipeline_cells`.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from megatron.fold3d.commands.timeline_picture import draw
from megatron.fold3d.observe.breakdown import Breakdown, exposure_of_ranks
from megatron.fold3d.observe.report.page import View
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.predict.simulator.link import sends_stock_waits_for
from megatron.fold3d.predict.simulator.simulate import simulate
from scripts.bench.pipeline_bound import OURS, fastest
from scripts.bench.pipeline_cells import Cell

CELL = Cell(num_ranks=4, data_parallel=1, num_microbatches=8, transfer=0.4, recompute=False)


def picture(cell: Cell) -> bytes:
    """Return the SVG of both iterations on one time axis."""
    costs, sizes = cell.costs, {"num_ranks": cell.num_ranks}
    sizes["num_microbatches"] = cell.num_microbatches
    stock = replace(OURS, sends_waited_for=sends_stock_waits_for(1))
    runs = {
        "Megatron's default, 1F1B": simulate(build("1f1b", num_segments=1, **sizes), costs, stock),
        "1F1B with forwards ahead and weight gradients in the gaps": simulate(
            fastest(costs, **sizes, gaps=True).order, costs, OURS
        ),
    }
    return draw(
        "FILE",
        "Ranks that wait for transfers: both pipelines on one time axis, simulated",
        [
            View(name=name, timeline=timeline, row=Breakdown(of_rank=exposure_of_ranks(timeline)))
            for name, timeline in runs.items()
        ],
    )


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="SVG to write")
    parser.parse_args().file.write_bytes(picture(CELL))


if __name__ == "__main__":
    main()
