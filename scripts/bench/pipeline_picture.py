"""Draw the pipeline-bound regime: stock's default above one segment with both ``auto``, simulated.

    .venv/bin/python -m scripts.bench.pipeline_picture docs/images/pipeline-bound.svg

The job and the links are those of a cell of `scripts.bench.pipeline_cells`.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from megatron.fold3d.observe.breakdown import exposure_of_ranks
from megatron.fold3d.observe.exposure import Exposure, mean
from megatron.fold3d.observe.report.draw import Pipeline, draw
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.predict.simulator.link import sends_stock_waits_for
from megatron.fold3d.predict.simulator.simulate import simulate
from scripts.bench.pipeline_bound import OURS, fastest
from scripts.bench.pipeline_cells import Cell

CELL = Cell(num_ranks=4, data_parallel=1, num_microbatches=8, transfer=0.4, recompute=False)
_A_LITTLE_MORE = 1.02


def picture(cell: Cell) -> str:
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
    rows = {name: mean(exposure_of_ranks(timeline)) for name, timeline in runs.items()}
    until_s = _A_LITTLE_MORE * max(row.total_s for row in rows.values())
    return draw(
        [Pipeline(name, _caption(rows[name]), timeline) for name, timeline in runs.items()],
        title="Ranks that wait for transfers: both pipelines on one time axis, simulated",
        until_s=until_s,
    )


def _caption(row: Exposure) -> str:
    shares = (("bubble", row.bubble_s), ("exposed PP.sync", row.p2p_s))
    of_it = (f"{what} {row.share(seconds):.0%}" for what, seconds in shares)
    return " · ".join((f"{row.total_s * 1e3:.0f} ms per iteration", *of_it))


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="SVG to write")
    parser.parse_args().file.write_text(picture(CELL), encoding="utf-8")


if __name__ == "__main__":
    main()
