"""Draw a result: simulated numbers as hatched bars, published ones as outlines.

matplotlib is an extra, `plots`; without it there are only the rows in text. An SVG describes itself
with these rows.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scripts.paper.results import Grid, Result

NEEDS = "no pictures without matplotlib: .venv/bin/pip install -e '.[plots]'"
_GREYS = ("0.25", "0.75", "0.5", "0.9")  # neighbours differ in print
_PUBLISHED = "published"
_HATCHES = ("///", "---", "\\\\\\", "xxx")


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
    drawn = [grid for grid in result.grids if {*grid.drawn} & {*grid.columns}]
    written = []
    for index, grid in enumerate(drawn):
        stem = result.name if index == 0 else f"{result.name}-{index + 1}"
        written += _picture(result, grid, folder / stem, measured=measured)
    return written


def _picture(result: Result, grid: Grid, stem: Path, *, measured: bool) -> list[Path]:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rows, columns = grid.rows, [column for column in grid.drawn if column in grid.columns]
    figure = Figure(figsize=(max(7.0, 0.9 * len(rows) + 2), 4.5), layout="constrained")
    axes = figure.subplots()
    for index, column in enumerate(columns):
        _bars(axes, grid, column, index, len(columns), measured=measured)
    axes.set_xticks(range(len(rows)), rows, rotation=45, ha="right", fontsize=8)
    axes.set_ylabel(grid.axis or grid.title)
    axes.set_title(f"{result.title} ({'measured' if measured else 'simulated'})", fontsize=10)
    by_label = {text: bars for bars, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    if outline := by_label.pop(_PUBLISHED, None):
        by_label[_PUBLISHED] = outline  # behind ours
    figure.legend(by_label.values(), by_label, fontsize=8, loc="outside right upper")
    svg, png = (stem.with_suffix(suffix) for suffix in (".svg", ".png"))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": result.name}):
        figure.savefig(svg, metadata={"Date": None, "Description": result.text()})
    figure.savefig(png)
    return [svg, png]


def _bars(axes: Any, grid: Grid, column: str, index: int, of: int, *, measured: bool) -> None:
    """Draw one of so many columns: ours with its spread, and the published as outlines."""
    width = 0.8 / of
    for row, name in enumerate(grid.rows):
        if (number := grid.at(name, column)) is None:
            continue
        at = row + (index - (of - 1) / 2) * width
        axes.bar(
            at,
            number.ours or 0.0,
            width,
            label=column,
            color=_GREYS[index % len(_GREYS)],
            hatch=None if measured else _HATCHES[index % len(_HATCHES)],
            edgecolor="white",
        )
        if number.spread:
            axes.vlines(at, *number.spread, color="white", linewidth=3)  # seen on dark bars too
            axes.vlines(at, *number.spread, color="black", linewidth=1.2)
        if isinstance(number.published, int | float):
            outline = {"edgecolor": "black", "linewidth": 1.5, "label": _PUBLISHED}
            axes.bar(at, number.published, width, fill=False, **outline)
