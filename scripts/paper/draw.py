"""Draw a result: a bar for each number of ours, and a stroke where the paper's is.

matplotlib is an extra, `plots`; without it there are only the rows in text. A picture describes
itself with these rows.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron.fold3d.commands.pictures import SIZE, as_bytes, figure
from megatron.fold3d.observe.report.palette import PLAIN, SERIES, color
from scripts.paper.results import Grid, Number, Result, short

NEEDS = "no pictures without matplotlib: .venv/bin/pip install -e '.[plots]'"
_SYSTEMS = ("fold3d", "megatron", "dspeed3d", "zero3")
_KINDS = {"fwd": "forward", "bwd": "backward", "dpsync": "sync", "ppsync": "p2p", "copies": "copy"}
_PAINTS = {name: color(kind, 0, 1) for name, kind in _KINDS.items()} | {"bubble": PLAIN["update"]}
_Group = Sequence[tuple[str, Number]]
"""A group of bars: what each shows, and its number."""


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw(result: Result, folder: Path, *, measured: bool = False) -> list[Path]:
    """Write the result's pictures, an SVG for each grid that is drawn, and one of its curves.

    Args:
        result: what to draw.
        folder: where to; it is made.
        measured: whether ours come from runs, as the title then says.
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
        pictures[folder / f"{result.name}-curves.svg"] = result.curves
    for file, svg in pictures.items():
        file.write_bytes(svg)
    return [*pictures]


def _picture(result: Result, grid: Grid, how: str) -> bytes:
    groups = defaultdict[str, list[tuple[str, Number]]](list)
    for number in grid.numbers:
        if number.column in grid.drawn:
            group, shown = grid.bars.get(number.row, (number.row, number.column))
            groups[group].append((shown, number))
    shown = by_system(name for group in groups.values() for name, _ in group)
    paints = {name: _paint(name, i) for i, name in enumerate(shown)}
    place, y, middles = _stack if grid.is_stacked else _bars, 0.0, []
    picture = figure(result.name, 0)
    axes = picture.subplots()
    for group in groups.values():
        below = place(axes, y, sorted(group, key=lambda b: shown.index(b[0])), paints, grid.mark)
        middles.append((y + below - 1) / 2)
        y = below + 0.5
    picture.set_figheight((110 + 16 * y) / 72)
    axes.set_yticks(middles, [*groups])
    axes.set(xlabel=grid.axis or grid.title, ylim=(y - 1, -1))
    axes.margins(x=0.12)
    axes.grid(axis="x")
    axes.tick_params(length=0)
    picture.suptitle(f"{result.title} ({how})", x=0.01, ha="left", weight="bold", size=SIZE)
    bars = {text: bar for bar, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    if len(bars) > 1:
        names = sorted(bars, key=[*shown, grid.mark].index)
        picture.legend([bars[n] for n in names], names, loc="outside lower left", ncols=5)
    return as_bytes(picture, result.title, result.text())


def by_system(names: Iterable[str]) -> list[str]:
    """Return names in an order in which those of the paper's systems are the first."""
    known = list(dict.fromkeys(names))
    return sorted(known, key=lambda n: (_SYSTEMS.index(n) if n in _SYSTEMS else len(_SYSTEMS)))


def _paint(name: str, number: int) -> str:
    """Return the color of what a bar shows, which is one in all pictures."""
    if name in _PAINTS:
        return _PAINTS[name]
    return SERIES[_SYSTEMS.index(name) if name in _SYSTEMS else number]


def _bars(axes: Any, y: float, group: _Group, paints: Mapping[str, str], mark: str) -> float:
    """Draw a bar for each number, with its spread; returns where the next one is."""
    for name, number in group:
        ends = [number.ours or 0.0, *(number.spread or ())]
        axes.barh(y, ends[0], 0.86, color=paints[name], label=name)
        if number.spread:
            axes.hlines(y, *number.spread, color=PLAIN["ink"], linewidth=1.2)
        if isinstance(number.published, int | float):
            ends.append(number.published)
            at = [number.published] * 2, [y - 0.43, y + 0.43]
            axes.plot(*at, color=PLAIN["ink"], linewidth=2.5, label=mark)
        _say(axes, max(ends), y, "–" if number.ours is None else short(number.ours))
        y += 1
    return y


def _stack(axes: Any, y: float, group: _Group, paints: Mapping[str, str], mark: str) -> float:
    """Draw our numbers end to end and, where all are known, the published ones below."""
    rows = {"": [number.ours for _, number in group]}
    rows[mark] = [number.published for _, number in group]
    for row, values in rows.items():
        if None in values:
            continue
        left = 0.0
        for (name, _), value in zip(group, values, strict=True):
            looks = {"alpha": 0.6} if row else {"label": name}
            axes.barh(y, value, 0.86, left, color=paints[name], **looks)
            left += value
        _say(axes, left, y, f"{short(left)} {row}")
        y += 1
    return y


def _say(axes: Any, x: float, y: float, text: str) -> None:
    """Write behind a bar, a little apart from it."""
    axes.annotate(text, (x, y), (5, 0), textcoords="offset points", va="center_baseline")
