"""Draw a result: simulated numbers as hatched bars, published ones as outlines.

matplotlib is an extra, `plots`; without it there are only the rows in text.
"""

from importlib.util import find_spec
from pathlib import Path

from scripts.paper.results import Grid, Result

NEEDS = "no pictures without matplotlib: .venv/bin/pip install -e '.[plots]'"
_GREYS = ("0.25", "0.75", "0.5", "0.9")  # neighbours differ in print
_HATCHES = ("///", "...", "\\\\\\", "xxx")


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw(result: Result, folder: Path, *, measured: bool = False) -> list[Path]:
    """Write the result's pictures, an SVG and a PNG for each grid that is drawn.

    Args:
        result: what to draw.
        folder: where to; it is made.
        measured: whether ours come from runs: then bars are plain, and the title says so.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = [grid for grid in result.grids if any(map(grid.has_ours, grid.drawn))]
    written = []
    for index, grid in enumerate(drawn):
        stem = result.name if index == 0 else f"{result.name}-{index + 1}"
        written += _picture(result, grid, folder / stem, measured=measured)
    return written


def _picture(result: Result, grid: Grid, stem: Path, *, measured: bool) -> list[Path]:
    from matplotlib.figure import Figure

    rows, columns = grid.rows, list(filter(grid.has_ours, grid.drawn))
    width = 0.8 / len(columns)
    figure = Figure(figsize=(max(6.0, 0.9 * len(rows) + 2), 4.5), layout="constrained")
    axes = figure.subplots()
    for index, column in enumerate(columns):
        at = [row + (index - (len(columns) - 1) / 2) * width for row in range(len(rows))]
        found = [grid.at(row, column) for row in rows]
        axes.bar(
            at,
            [number.ours or 0.0 if number else 0.0 for number in found],
            width,
            label=column,
            color=_GREYS[index % len(_GREYS)],
            hatch=None if measured else _HATCHES[index % len(_HATCHES)],
            edgecolor="white",
        )
        for x, spread in ((x, n.spread) for x, n in zip(at, found, strict=True) if n):
            if spread:
                axes.vlines(x, *spread, color="black", linewidth=1.2)
        outlined = [
            (x, n.published)
            for x, n in zip(at, found, strict=True)
            if n is not None and isinstance(n.published, int | float)
        ]
        if outlined:
            axes.bar(
                [x for x, _ in outlined],
                [height for _, height in outlined],
                width,
                fill=False,
                edgecolor="black",
                linewidth=1.5,
                label="published" if index == len(columns) - 1 else None,
            )
    axes.set_xticks(range(len(rows)), rows, rotation=45, ha="right", fontsize=8)
    axes.set_ylabel(grid.title)
    axes.set_title(f"{result.title} ({'measured' if measured else 'simulated'})")
    figure.legend(fontsize=8, loc="outside right upper")
    paths = [stem.with_suffix(suffix) for suffix in (".svg", ".png")]
    for path in paths:
        figure.savefig(path)
    return paths
