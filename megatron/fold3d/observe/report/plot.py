"""Line plots side by side as one self-contained SVG, in the colors of the diagrams."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import ceil, floor, isfinite, log10

from megatron.fold3d.observe.report.palette import HUES, STYLE, color
from megatron.fold3d.observe.report.svg import WIDTH, opening, text

HEIGHT = 436
_TOP, _BOTTOM, _LEFT, _RIGHT = 108, 56, 66, 22
_MOST_POINTS = 1500  # per line; a screen shows no more
_FIRST = ("forward", "backward", "sync")
_COLORS = tuple(color(kind, 0, 1) for kind in dict.fromkeys((*_FIRST, *HUES)))

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot: a line per name."""

    x_label: str
    y_label: str
    lines: Mapping[str, Points]


def plot(title: str, panels: Sequence[Panel]) -> str:
    """Return the SVG of plots that share their lines' names and colors."""
    return "".join(_elements(title, panels))


def _elements(title: str, panels: Sequence[Panel]) -> Iterator[str]:
    yield opening(title, HEIGHT, STYLE)
    yield text(24, 38, 19, title, bold=True)
    x = 24.0
    names = list(panels[0].lines)
    for name, paint in zip(names, cycle(_COLORS), strict=False):
        yield f'<path d="M{x} 60h22" stroke="{paint}" stroke-width="3" stroke-linecap="round"/>\n'
        yield text(x + 29, 64.5, 13.5, name)
        x += 29 + len(name) * 7.4 + 26
    width = WIDTH / len(panels)
    for i, panel in enumerate(panels):
        yield from _panel(panel, i * width, width)
    yield "</svg>\n"


def _panel(panel: Panel, left: float, width: float) -> Iterator[str]:
    lines = [[p for p in points if isfinite(p[1])] for points in panel.lines.values()]
    points = [point for line in lines for point in line]
    if not points:
        return
    x_low, x_high = _range([x for x, _ in points])
    y_low, y_high = _range([y for _, y in points])
    room_x, room_y = width - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
    bottom = HEIGHT - _BOTTOM

    def at_x(x: float) -> float:
        return left + _LEFT + (x - x_low) / (x_high - x_low) * room_x

    def at_y(y: float) -> float:
        return bottom - (y - y_low) / (y_high - y_low) * room_y

    for tick, label in _ticks(y_low, y_high, 6):
        y = at_y(tick)
        yield f'<path class="line" d="M{left + _LEFT:.1f} {y:.1f}h{room_x:.1f}"/>\n'
        yield text(left + _LEFT - 9, y + 4, 12, label, "soft", anchor="end")
    for tick, label in _ticks(x_low, x_high, 7):
        yield text(at_x(tick), bottom + 20, 12, label, "soft", anchor="middle")
    yield text(left + _LEFT + room_x, bottom + 42, 13, panel.x_label, anchor="end")
    yield text(left + _LEFT, _TOP - 10, 13, panel.y_label)
    for i, (line, paint) in enumerate(zip(lines, cycle(_COLORS), strict=False)):
        kept = _thinned(line)
        path = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in kept)
        # Where lines lie on each other, the ones below shine through the gaps of those above.
        dashes = ' stroke-dasharray="7 6"' if i else ""
        yield (
            f'<polyline fill="none" stroke="{paint}" stroke-width="2.2" stroke-linejoin="round"'
            f'{dashes} points="{path}"/>\n'
        )
        if kept:
            x, y = kept[-1]
            yield f'<circle cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="4" fill="{paint}"/>\n'


def _thinned(line: Points) -> list[tuple[float, float]]:
    every = ceil(len(line) / _MOST_POINTS) or 1
    last = list(line[-1:]) if (len(line) - 1) % every else []
    return [*line[::every], *last]


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def _ticks(low: float, high: float, about: int) -> Iterator[tuple[float, str]]:
    """Round numbers within a range, and how to write them."""
    power = 10.0 ** floor(log10((high - low) / about))
    step = next(power * k for k in (1, 2, 5, 10) if (high - low) / (power * k) <= about)
    decimals = max(0, -floor(log10(step) + 1e-9))
    for i in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1):
        yield i * step, f"{i * step:.{decimals}f}"
