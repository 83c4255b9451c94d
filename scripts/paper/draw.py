"""Draw a result: a bar for each number of ours, and a stroke where the paper's is.

A picture describes itself with the rows in text, which are all that there is without matplotlib.
"""

from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from megatron.fold3d.commands.pictures import plot_losses
from megatron.fold3d.observe.report.palette import PLAIN, SERIES, color
from scripts.paper.bars import Bar, plot_bars
from scripts.paper.results import Grid, Number, Result

_SYSTEMS = ("fold3d", "megatron", "dspeed3d", "zero3")
_KINDS = {
    "forward": "forward",
    "backward": "backward",
    "DP.sync": "sync",
    "PP.sync": "p2p",
    "copies": "copy",
}
_SHOWN = {"fwd": "forward", "bwd": "backward", "dpsync": "DP.sync", "ppsync": "PP.sync"}
_PAINTS = {name: color(kind, 0, 1) for name, kind in _KINDS.items()}
_PAINTS |= {"bubble": PLAIN["update"], "stock's order": SERIES[3], "the fastest": SERIES[0]}


def draw(result: Result, folder: Path, *, measured: bool = False) -> list[Path]:
    """Write the result's pictures, an SVG for each grid that is drawn, and one of its curves.

    Args:
        measured: whether ours come from runs, as the title then says.

    Raises:
        ValueError: matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    grids = [grid for grid in result.grids if {*grid.drawn} & {*grid.columns}]
    pictures = {
        folder / f"{result.name}{f'-{index}' if index > 1 else ''}.svg": _picture(
            result, grid, "measured" if measured else "simulated"
        )
        for index, grid in enumerate(grids, 1)
    }
    if result.curves:
        title = "Loss of a small GPT, mean of 10 iterations (measured)"
        pictures[folder / f"{result.name}-curves.svg"] = plot_losses(title, result.curves)
    for file, svg in pictures.items():
        file.write_bytes(svg)
    return [*pictures]


def _picture(result: Result, grid: Grid, how: str) -> bytes:
    groups = defaultdict[str, dict[str, Number]](dict)
    for number in grid.numbers:
        if number.column in grid.drawn:
            group, shown = grid.bars.get(number.row, (number.row, number.column))
            groups[group][_SHOWN.get(shown, shown)] = number
    names = by_system(chain.from_iterable(groups.values()))
    return plot_bars(
        f"{result.title} ({how})",
        grid.axis or grid.title,
        {
            group: [
                _bar(name, number, bars[name]) for number, name in enumerate(names) if name in bars
            ]
            for group, bars in groups.items()
        },
        other=grid.mark,
        stacked=grid.is_stacked,
        description=result.text(),
    )


def by_system(names: Iterable[str]) -> list[str]:
    """Return names in an order in which those of the paper's systems are the first."""
    known = list(dict.fromkeys(names))
    return sorted(known, key=lambda n: _SYSTEMS.index(n) if n in _SYSTEMS else len(_SYSTEMS))


def _bar(name: str, index: int, number: Number) -> Bar:
    """Return a bar in the color of what it shows, which is one in all pictures."""
    of_series = SERIES[_SYSTEMS.index(name) if name in _SYSTEMS else index]
    published = None if isinstance(number.published, tuple) else number.published
    return Bar(name, _PAINTS.get(name, of_series), number.ours, published, number.spread)
