"""Draw timelines as pipeline diagrams (paper Fig. 4): an SVG, by matplotlib.

A row per rank shows forwards and backwards as boxes with their micro-batch, in a hue per direction
and a shade per segment. DP.sync and copies are in thin lanes below. Waits for DP.sync or sends are
outlines in the color of what is waited for, and short ones are filled, since an outline would be
wider than they are. Where the background shows, the rank is idle.
"""

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from math import ceil
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.fold3d.commands.pictures import CHAR, SIZE, WIDTH, as_bytes, figure
from megatron.fold3d.observe.breakdown import View
from megatron.fold3d.observe.report.palette import DARK_TEXT, HUES, PLAIN, color, text_on
from megatron.fold3d.observe.timeline import BUSY_LANES, Lane, Span, Timeline, queued
from megatron.fold3d.plan.ops import P2P_OPS, PART_OPS, TABLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEGEND = {
    "forward": "forward",
    "recompute": "recomputation",
    "backward": "backward",
    "weight": "weight gradient",
    "sync": "DP.sync",
    "copy": "host copy",
    "waits-sync": "waits for DP.sync",
    "waits-p2p": "waits for sends",
    "update": "optimizer",
    "row": "bubble",
}
"""The looks of spans, with their names: a kind of work, which has shades, or one of `PLAIN`."""
_THIN_LANES = (Lane.GRAD_SYNC, Lane.COPY)
_DRAWN = (*BUSY_LANES, *_THIN_LANES)
_MOST_VECTORS = 1_000  # boxes of a color; more of them are pixels
_OUTLINED = ("waits-sync", "waits-p2p")
_UNITS = (
    ("s", 1.0),
    ("ms", 1e-3),
    ("µs", 1e-6),
)  # the first that a time contains
_A_LITTLE_MORE = 1.02
# In points.
_LEFT, _ACROSS = 52.0, WIDTH - 64
_SPACE, _LINE, _AXIS = 12.0, 17.0, 44.0  # above words, of each of their lines, and below diagrams
_THIN = 11.0  # the most of a thin lane
_LABEL = 10.0  # size of words in a box: 7 pixels where a phone shows them
_OUTLINE = 1.1  # its width
_BOLD_CHAR = 0.66  # as `CHAR`, of a title
_COLUMNS = 3  # of the legend


def draw(asked: str, title: str, views: Sequence[View]) -> bytes:
    """Return the SVG of a run or, of several, one above the other on one time axis.

    Several are shown for a steady iteration of the slowest and a little more.

    Args:
        asked: the option that asks for the picture.
        views: simulated or measured runs; a single run's name is not shown.
    """
    shown, end_s = [view.timeline for view in views], None
    if len(views) > 1:
        end_s = _A_LITTLE_MORE * max(view.row.iteration.total_s for view in views)
        starts_s = [(0.0, *timeline.ends_s)[len(timeline.ends_s) > 1] for timeline in shown]
        shown = [t.between(s, s + end_s) for t, s in zip(shown, starts_s, strict=True)]
    diagrams = [*map(_Diagram, shown)]
    end_s = end_s or diagrams[0].last_s
    unit, unit_s = next((u for u in _UNITS if end_s >= u[1]), ("s", 1.0))
    legend = _legend(diagrams)
    title_lines = _in_lines(title, _BOLD_CHAR)
    captions = [_in_lines(_caption(view), CHAR) for view in views]
    names = [[view.name] if len(views) > 1 else [] for view in views]
    num_lines = sum(map(len, (title_lines, *names, *captions))) + ceil(len(legend) / _COLUMNS)
    height = _SPACE * (1 + len(views)) + _LINE * num_lines + _AXIS
    height += sum(diagram.height for diagram in diagrams)
    with figure(asked, height) as picture:
        picture.set_layout_engine("none")

        def write(lines: Sequence[str], top: float, ink: str, weight: str = "normal") -> float:
            at = _SPACE / WIDTH, 1 - top / height
            picture.text(*at, "\n".join(lines), va="top", color=PLAIN[ink], weight=weight)
            return top + _LINE * len(lines)

        top = write(title_lines, _SPACE, "ink", "bold")
        for name, caption, diagram in zip(names, captions, diagrams, strict=True):
            top = write(caption, write(name, top + _SPACE, "ink", "bold"), "soft") + diagram.height
            place = (_LEFT / WIDTH, 1 - top / height, _ACROSS / WIDTH, diagram.height / height)
            axes = picture.add_axes(place, frameon=False)
            axes.set(xlim=(0, end_s / unit_s or 1.0), ylim=(diagram.height, 0))
            axes.tick_params(length=0, labelcolor=PLAIN["soft"], labelbottom=False)
            diagram.fill(axes, unit_s)
        axes.tick_params(labelbottom=True)  # the last one's
        axes.set_xlabel(f"time [{unit}]")
        _add(picture, legend)
        return as_bytes(picture, title)


def _in_lines(text: str, of_char: float) -> list[str]:
    """Return a text in as many lines as it needs."""
    return wrap(text, int((WIDTH - 24) / SIZE / of_char), break_on_hyphens=False)


def _caption(view: View) -> str:
    row = view.row.iteration
    exposed = (("DP.sync", row.grad_sync_s), ("PP.sync", row.p2p_s), ("copies", row.copy_s))
    parts = [f"bubble {row.share(row.bubble_s):.1%}"]
    if shares := [f"{what} {row.share(s):.1%}" for what, s in exposed if s > 0]:
        parts.append(f"exposed {', '.join(shares)}")
    return f"{view.time(row.total_s)} per iteration: {', '.join(parts)}"


class _Diagram:
    """One timeline: how high its lanes are, in points, and what is in them."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline, self.segments = timeline, timeline.num_segments
        drawn = [span for spans in timeline.ranks for span in spans if span.lane in _DRAWN]
        self.last_s = max((span.end_s for span in drawn), default=0.0)  # no bubble after it
        used, ranks = {span.lane for span in drawn}, max(1, timeline.num_ranks)
        row = min(22.0, max(3.0, 375 / ranks))
        self.rows: list[tuple[Container[Lane], float]] = [(BUSY_LANES, row)]
        self.rows += [({lane}, min(_THIN, row / 2)) for lane in _THIN_LANES if lane in used]
        self.space = min(1.5, row / 8)
        self.pitch = sum(height + self.space for _, height in self.rows) + min(8.0, row / 3)
        self.height = ranks * self.pitch

    def fill(self, axes: "Axes", unit_s: float) -> None:
        """Draw it, a path for all boxes of a color."""
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path

        tops = [rank * self.pitch for rank in range(self.timeline.num_ranks)]
        shown = range(0, len(tops), ceil(SIZE / self.pitch))  # names that do not touch each other
        middles = [tops[rank] + self.rows[0][1] / 2 for rank in shown]
        axes.set_yticks(middles, [f"rank {rank}" for rank in shown])
        point = axes.get_xlim()[1] / _ACROSS
        boxes = defaultdict[tuple[str, int, bool], list[_Box]](list)
        for lanes, height in self.rows:
            background = PLAIN["row" if lanes is BUSY_LANES else "thin"]
            last = self.last_s / unit_s
            axes.barh(tops, last, height, align="edge", color=background, zorder=0)
            for spans, top in zip(self.timeline.ranks, tops, strict=True):
                for span in queued(span for span in spans if span.lane in lanes):
                    times = span.start_s / unit_s, span.end_s / unit_s
                    look, segment, label = _meaning(span, self.timeline.num_ranks)
                    outlined = look in _OUTLINED and times[1] - times[0] > 4 * _OUTLINE * point
                    boxes[look, segment, outlined].append(_Box(*times, top, top + height, label))
            tops = [top + height + self.space for top in tops]
        rectangle = (Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY)
        for (look, segment, outlined), same in boxes.items():
            corners = [corner for box in same for corner in box.corners(outlined, point)]
            path = Path(corners, rectangle * len(same))
            paint = _paint(look, segment, self.segments, outlined)
            paint["rasterized"] = len(same) > _MOST_VECTORS
            short = "short-" * (look in _OUTLINED and not outlined)
            # As add_patch, which would also look for limits, point by point.
            axes.add_artist(PathPatch(path, gid=f"{short}{look}-{segment}", **paint))
            # 9 and 10 alike: numbers that end in the middle of a row look like an end of the work.
            longest = max(len(box.label) for box in same)
            for left, right, top, bottom, label in same:
                room = (right - left) / point - 2
                if label and bottom - top > _LABEL and longest * _LABEL * CHAR < room:
                    ink = text_on(look, segment, self.segments) if look in HUES else DARK_TEXT
                    place = (left + right) / 2, (top + bottom) / 2
                    axes.text(
                        *place, label, size=_LABEL, color=ink, ha="center", va="center_baseline"
                    )
        for end_s in self.timeline.ends_s:
            axes.axvline(end_s / unit_s, ls="--", lw=0.7, color=PLAIN["soft"])
        axes.grid(axis="x", color=PLAIN["line"], lw=0.7)
        axes.set_axisbelow(True)


class _Box(NamedTuple):
    """A rectangle in the units of the axes, and the words in it."""

    left: float
    right: float
    top: float
    bottom: float
    label: str

    def corners(self, outlined: bool, point: float) -> list[tuple[float, float]]:
        """Return the corners; boxes are a little apart, and an outline lies inside of its own."""
        width = self.right - self.left
        x, y = (0.9, 0.6) if outlined else (0.33 * (width > 3 * point), 0.0)
        x = min(x * point, width / 2)
        left, right, top, bottom = self.left + x, self.right - x, self.top + y, self.bottom - y
        return [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]


def _meaning(span: Span, num_ranks: int) -> tuple[str, int, str]:
    """Return what a span is drawn as, a key of `_LEGEND`, its segment, and the words in it."""
    action = span.action
    if span.lane is Lane.OPTIMIZER or action is None:
        return "row" if action is None else "update", 0, ""
    if span.lane is Lane.WAIT:
        return "waits-p2p" if action.op in P2P_OPS else "waits-sync", 0, ""
    look, segment = TABLE[action.op].kind, action.stage // num_ranks
    if action.microbatch is not None and action.op not in PART_OPS:
        return look, segment, str(action.microbatch)
    return look, segment, f"DP.sync {segment}" if look == "sync" else ""


def _paint(look: str, segment: int, segments: int, outlined: bool) -> dict[str, Any]:
    """Return how a patch is painted: long waits are outlines, all else is a fill."""
    if outlined:
        return {"facecolor": "none", "edgecolor": PLAIN[look], "lw": _OUTLINE}
    fill = color(look, segment, segments) if look in HUES else PLAIN[look]
    return {"facecolor": fill, "edgecolor": "none"}


def _legend(diagrams: Sequence[_Diagram]) -> dict[str, list[dict[str, Any]]]:
    """Return what is drawn, by its name: the paint of each segment."""
    segments = max(diagram.segments for diagram in diagrams)
    drawn = {"row"} | {
        _meaning(span, diagram.timeline.num_ranks)[0]
        for diagram in diagrams
        for spans in diagram.timeline.ranks
        for span in spans
        if span.lane in _DRAWN
    }
    entries = {
        name: [
            _paint(look, s, segments, look in _OUTLINED)
            for s in range(segments if look in HUES else 1)
        ]
        for look, name in _LEGEND.items()
        if look in drawn
    }
    return entries | ({"darker: later segment": [{"alpha": 0}]} if segments > 1 else {})


def _add(picture: "Figure", legend: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    picture.legend(
        handles=[tuple(Patch(**paint) for paint in paints) for paints in legend.values()],
        labels=[*legend],
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        loc="lower left",
        bbox_to_anchor=(_SPACE / WIDTH, 4 / 72 / picture.get_figheight()),
        ncols=_COLUMNS,
        borderpad=0,
        borderaxespad=0,
        labelspacing=0.2,
        columnspacing=1.2,
    )
