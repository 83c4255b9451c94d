"""Groups of bars with their values, as pictures in the style of the `fold3d` command."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from megatron.fold3d.commands.pictures import CHAR, SIZE, WIDTH, as_bytes, figure
from megatron.fold3d.observe.report.palette import PLAIN

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_THICK = 0.86  # of a bar, in the distance to the next one
_ROOM = 0.15  # of the longest bar or stroke, for the value behind a bar
_HANDLE = 4.0  # of a legend's entry beside its words, over the font size


class Bar(NamedTuple):
    """A bar of a group.

    Attributes:
        name: what it shows; the legend has each name once.
        paint: its color.
        value: how long it is; None if that is not known.
        other: another value for the same, which is a stroke, or a paler bar below a stack.
        spread: the quartiles of a measured value.
    """

    name: str
    paint: str
    value: float | None
    other: float | None = None
    spread: tuple[float, float] | None = None


def plot_bars(
    title: str,
    axis: str,
    groups: Mapping[str, Sequence[Bar]],
    *,
    other: str = "",
    stacked: bool = False,
    description: str | None = None,
) -> bytes:
    """Return the SVG of groups of bars, with their values; equal ones give equal bytes.

    Args:
        axis: what the values are, with their unit.
        groups: the bars of each group, by its name.
        other: what the other values are.
        stacked: whether the bars of a group are parts of one.
        description: metadata of the file.
    """
    place = _stack if stacked else _side_by_side
    bars = [bar for group in groups.values() for bar in group]
    widest = max(value for bar in bars for value in (bar.value, bar.other) if value is not None)
    with figure("pictures", 0) as picture:
        axes, y, middles = picture.subplots(), 0.0, []
        for group in groups.values():
            below = place(axes, y, group, other, _ROOM * widest)
            middles.append((y + below - 1) / 2)
            y = below + 0.5
        axes.set_yticks(middles, [*groups])
        axes.set(xlabel=axis, ylim=(y - 1, -1))
        axes.margins(x=0.12)
        axes.grid(axis="x")
        axes.tick_params(length=0)
        picture.suptitle(title, x=0.01, ha="left", weight="bold", size=SIZE)
        handles = {text: bar for bar, text in zip(*axes.get_legend_handles_labels(), strict=True)}
        if stroke := handles.pop(other, None):
            handles[other] = stroke  # behind the bars
        columns = _columns(handles)
        further_lines = ceil(len(handles) / columns) - 1
        picture.set_figheight((110 + 16 * y + 17 * further_lines) / 72)
        if len(handles) > 1:
            picture.legend(handles.values(), handles, loc="outside lower left", ncols=columns)
        return as_bytes(picture, title, description)


def _columns(names: Iterable[str]) -> int:
    """Return how many entries a line of the legend has: all of them if they fit."""
    widths = [SIZE * (_HANDLE + CHAR * len(name)) for name in names]
    return len(widths) if sum(widths) <= WIDTH else int(WIDTH / max(widths))


def _side_by_side(axes: "Axes", y: float, group: Sequence[Bar], other: str, room: float) -> float:
    """Draw a bar for each value, with its spread; returns where the next one is."""
    for bar in group:
        end = max(bar.value or 0.0, *(bar.spread or (0.0,)))
        axes.barh(y, bar.value or 0.0, _THICK, color=bar.paint, label=bar.name)
        if bar.spread:
            axes.hlines(y, *bar.spread, color=PLAIN["ink"], linewidth=1.2)
        if bar.other is not None:
            at = [bar.other] * 2, [y - _THICK / 2, y + _THICK / 2]
            axes.plot(*at, color=PLAIN["ink"], linewidth=2.5, label=other)
            end = bar.other if end < bar.other < end + room else end  # words hide no stroke
        _say(axes, end, y, "–" if bar.value is None else _short(bar.value))
        y += 1
    return y


def _stack(axes: "Axes", y: float, group: Sequence[Bar], other: str, _: float) -> float:
    """Draw values end to end and, where all are known, the others below."""
    for what, values in (("", [b.value for b in group]), (other, [b.other for b in group])):
        known = [value for value in values if value is not None]
        if len(known) < len(group):
            continue
        for bar, value, left in zip(group, known, accumulate(known, initial=0.0), strict=False):
            label = {"alpha": 0.6} if what else {"label": bar.name}
            axes.barh(y, value, _THICK, left, color=bar.paint, **label)
        _say(axes, sum(known), y, f"{_short(sum(known))} {what}")
        y += 1
    return y


def _say(axes: "Axes", x: float, y: float, text: str) -> None:
    """Write behind a bar, a little apart from it."""
    axes.annotate(text, (x, y), (5, 0), textcoords="offset points", va="center_baseline")


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
