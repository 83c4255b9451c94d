"""Draw a result: a bar for each number of ours, and a stroke where the paper's is.

A picture describes itself with the rows in text, which are all that there is without matplotlib.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.fold3d.commands.pictures import CHAR, SIZE, WIDTH, as_bytes, figure, plot_losses
from megatron.fold3d.observe.report.palette import PLAIN, SERIES, color
from scripts.paper.results import Grid, Number, Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_THICK = 0.86  # of a bar, in the distance to the next one
_ROOM = 0.15  # of the longest bar or stroke, for the value behind a bar
_HANDLE = 4.0  # of a legend's entry beside its words, over the font size
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
_Bars = Sequence[tuple[dict[str, Any], Number]]  # with their looks


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
    """Return the SVG of groups of bars, with their values; equal ones give equal bytes."""
    groups = defaultdict[str, dict[str, Number]](dict)
    for number in grid.numbers:
        if number.column in grid.drawn:
            group, shown = grid.bars.get(number.row, (number.row, number.column))
            groups[group][_SHOWN.get(shown, shown)] = number
    names = by_system(chain.from_iterable(groups.values()))
    drawn = [number for bars in groups.values() for number in bars.values()]
    widest = max(v for n in drawn for v in (n.ours, n.said) if v is not None)
    place = _stack if grid.is_stacked else _side_by_side
    title = f"{result.title} ({how})"
    with figure("pictures", 0) as picture:
        axes, y, middles = picture.subplots(), 0.0, []
        for bars in groups.values():
            looks = [(_look(n, name), bars[name]) for n, name in enumerate(names) if name in bars]
            below = place(axes, y, looks, grid.mark, _ROOM * widest)
            middles.append((y + below - 1) / 2)
            y = below + 0.5
        axes.set_yticks(middles, [*groups])
        axes.set(xlabel=grid.axis or grid.title, ylim=(y - 1, -1))
        axes.margins(x=0.12)
        axes.grid(axis="x")
        axes.tick_params(length=0)
        picture.suptitle(title, x=0.01, ha="left", weight="bold", size=SIZE)
        handles = {text: bar for bar, text in zip(*axes.get_legend_handles_labels(), strict=True)}
        if stroke := handles.pop(grid.mark, None):
            handles[grid.mark] = stroke  # behind the bars
        columns = _columns(handles)
        further_lines = ceil(len(handles) / columns) - 1
        picture.set_figheight((110 + 16 * y + 17 * further_lines) / 72)
        if len(handles) > 1:
            picture.legend(handles.values(), handles, loc="outside lower left", ncols=columns)
        return as_bytes(picture, title, result.text())


def by_system(names: Iterable[str]) -> list[str]:
    """Return names in an order in which those of the paper's systems are the first."""
    known = list(dict.fromkeys(names))
    return sorted(known, key=lambda n: _SYSTEMS.index(n) if n in _SYSTEMS else len(_SYSTEMS))


def _look(index: int, name: str) -> dict[str, str]:
    """Return a bar's color, which is one in all pictures for what it shows, and its name."""
    of_series = SERIES[_SYSTEMS.index(name) if name in _SYSTEMS else index]
    return {"color": _PAINTS.get(name, of_series), "label": name}


def _columns(names: Iterable[str]) -> int:
    """Return how many entries a line of the legend has: all of them if they fit."""
    widths = [SIZE * (_HANDLE + CHAR * len(name)) for name in names]
    return len(widths) if sum(widths) <= WIDTH else int(WIDTH / max(widths))


def _side_by_side(axes: "Axes", y: float, bars: _Bars, mark: str, room: float) -> float:
    """Draw a bar for each number, with its spread; returns where the next one is."""
    for look, number in bars:
        end = max(number.ours or 0.0, *(number.spread or (0.0,)))
        axes.barh(y, number.ours or 0.0, _THICK, **look)
        if number.spread:
            axes.hlines(y, *number.spread, color=PLAIN["ink"], linewidth=1.2)
        if number.said is not None:
            at = [number.said] * 2, [y - _THICK / 2, y + _THICK / 2]
            axes.plot(*at, color=PLAIN["ink"], linewidth=2.5, label=mark)
            end = number.said if end < number.said < end + room else end  # words hide no stroke
        _say(axes, end, y, "–" if number.ours is None else _short(number.ours))
        y += 1
    return y


def _stack(axes: "Axes", y: float, bars: _Bars, mark: str, _: float) -> float:
    """Draw numbers end to end and, where all are known, the published ones, paler, below."""
    looks, ours, published = zip(*((look, n.ours, n.said) for look, n in bars), strict=True)
    for what, values, pale in (("", ours, {}), (mark, published, {"alpha": 0.6, "label": ""})):
        known = [value for value in values if value is not None]
        if len(known) < len(bars):
            continue
        for look, value, left in zip(looks, known, accumulate(known, initial=0.0), strict=False):
            axes.barh(y, value, _THICK, left, **look | pale)
        _say(axes, sum(known), y, f"{_short(sum(known))} {what}")
        y += 1
    return y


def _say(axes: "Axes", x: float, y: float, text: str) -> None:
    """Write behind a bar, a little apart from it."""
    axes.annotate(text, (x, y), (5, 0), textcoords="offset points", va="center_baseline")


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
