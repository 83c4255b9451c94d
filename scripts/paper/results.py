"""What an experiment found: numbers of ours beside the paper's, and their text form."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import fmean

from megatron.fold3d.commands.console import faster, faster_between, table
from megatron.fold3d.commands.pictures import Lines

Published = float | tuple[float, float] | None
"""A number of the paper, the two ends of a range that it states, or nothing."""


@dataclass(frozen=True, slots=True)
class Number:
    """One number of a table or figure."""

    row: str
    column: str
    ours: float | None
    """None where no simulation gives it."""
    published: Published = None
    spread: tuple[float, float] | None = None
    """The quartiles of a measured one."""
    is_gain: bool = False
    """Whether it is how many times as fast a system is, which is spelled as a gain."""

    @property
    def said(self) -> float | None:
        """What the paper has, if that is no range."""
        return None if isinstance(self.published, tuple) else self.published

    @property
    def error(self) -> float | None:
        """Ours relative to the paper's: zero within a range, else from its nearer end."""
        if self.ours is None or self.published is None:
            return None
        if isinstance(self.published, tuple):
            low, high = self.published
            nearest = min(max(self.ours, low), high)
        else:
            nearest = self.published
        return self.ours / nearest - 1 if nearest else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Numbers by row and column.

    Attributes:
        title: what they are, with their unit.
        numbers: in the order of rows and columns.
        drawn: the columns that a picture has; empty means that the grid is not drawn.
        bars: where rows are bars of a group as in the paper: the group, and what the bar shows.
        is_stacked: whether the columns of a row are parts of one bar.
        axis: what they are; by default the title.
        mark: what else a bar has a stroke for.
    """

    title: str
    numbers: tuple[Number, ...]
    drawn: tuple[str, ...] = ()
    bars: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    is_stacked: bool = False
    axis: str = ""
    mark: str = "published"

    @property
    def rows(self) -> list[str]:
        """The names of the rows."""
        return list(dict.fromkeys(number.row for number in self.numbers))

    @property
    def columns(self) -> list[str]:
        """The names of the columns that have a number of ours."""
        return list(dict.fromkeys(n.column for n in self.numbers if n.ours is not None))

    def at(self, row: str, column: str) -> Number | None:
        """Return the number of a cell."""
        return next((n for n in self.numbers if (n.row, n.column) == (row, column)), None)

    def errors(self, column: str) -> list[float]:
        """Return the absolute errors of a column."""
        found = (number.error for number in self.numbers if number.column == column)
        return [abs(error) for error in found if error is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """An experiment's grids, and what to know about them.

    Attributes:
        verdicts: claims of the text that are no numbers, and whether they hold here.
        notes: what to know, such as what no simulation gives.
        curves: the lines of plots of losses, by what they are over.
    """

    name: str
    title: str
    grids: tuple[Grid, ...]
    verdicts: tuple[tuple[str, bool], ...] = ()
    notes: tuple[str, ...] = ()
    curves: Mapping[str, Lines] = field(default_factory=dict)

    def text(self) -> str:
        """Return the result for people."""
        parts = [f"{self.name}: {self.title}"]
        parts += ["\n".join(_lines(grid)) for grid in self.grids if grid.columns]
        if self.verdicts:
            answers = {True: "holds", False: "does not hold"}
            parts.append("\n".join(f"{claim}: {answers[is_so]}" for claim, is_so in self.verdicts))
        if self.notes:
            parts.append("\n".join(f"! {note}" for note in self.notes))
        return "\n\n".join(parts)


def claims(*found: tuple[str, Published, float | None], gains: bool = False) -> Grid:
    """Return the grid of what the paper's text claims: a row per claim, published and ours."""
    return Grid(
        title="The text's claims",
        numbers=tuple(
            Number(text, "value", ours, published, is_gain=gains) for text, published, ours in found
        ),
    )


def _lines(grid: Grid) -> Iterator[str]:
    """Yield a grid's title, header, rows and mean errors, in aligned columns."""
    rows = [(row, *(_cell(grid.at(row, column)) for column in grid.columns)) for row in grid.rows]
    means = [f"{fmean(e):.1%}" if (e := grid.errors(column)) else "" for column in grid.columns]
    if any(means):
        rows.append(("mean error", *means))
    yield f"{grid.title}; {grid.mark} > ours (error)"
    yield from table([("", *grid.columns), *rows])


def _cell(number: Number | None) -> str:
    if number is None:
        return "-"
    published, ours = number.published, number.ours
    if isinstance(published, tuple):
        words = _range(number, published)
    else:
        words = "?" if published is None else _spelled(number, published)
    if ours is None:
        return f"{words} > -"
    spread = f" [{_range(number, number.spread)}]" if number.spread else ""
    error = "" if number.error is None else f" ({number.error:+.1%})"
    return f"{words} > {_spelled(number, ours)}{spread}{error}"


def _range(number: Number, ends: tuple[float, float]) -> str:
    low, high = ends
    return faster_between(low - 1, high - 1) if number.is_gain else "-".join(map(_short, ends))


def _spelled(number: Number, value: float) -> str:
    return faster(value - 1) if number.is_gain else _short(value)


def _short(value: float) -> str:
    decimals = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{decimals}f}"
