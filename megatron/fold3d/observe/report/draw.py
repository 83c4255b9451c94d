"""Draw a timeline as a pipeline diagram (paper Fig. 4): one self-contained SVG.

A row per rank shows forwards and backwards as boxes with their micro-batch, in a hue per direction
and a shade per segment. DP.sync and copies are in thin lanes below. Waits for DP.sync or sends are
outlines in the color of what is waited for. Where the background shows, the rank is idle.
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from math import ceil, floor, log10
from typing import NamedTuple

from megatron.fold3d.observe.exposure import Exposure, exposure, mean
from megatron.fold3d.observe.report.page import View
from megatron.fold3d.observe.report.palette import HUES, STYLE, css_class, rules, takes_dark_text
from megatron.fold3d.observe.report.svg import WIDTH, opening, rect, text
from megatron.fold3d.observe.timeline import Lane, Span, Timeline, queued
from megatron.fold3d.plan.ir import Action, Plan
from megatron.fold3d.plan.memory import peak_activations
from megatron.fold3d.plan.ops import P2P_OPS, PART_OPS, TABLE

_LEFT, _RIGHT = 78, 28
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
"""What spans are drawn as: a kind of work, which has shades, or a CSS class. And their names."""
_OUTLINED = ("waits-sync", "waits-p2p")
_THIN_LANES = (Lane.GRAD_SYNC, Lane.COPY)
_MAX_TOOLTIPS = 1500
_A_LITTLE_MORE = 1.02
_CHAR = 0.6  # width of a character over the font size


class Pipeline(NamedTuple):
    """A timeline, and the words above it: a name on the left, a caption on the right."""

    name: str
    caption: str
    timeline: Timeline


def draw(pipelines: Sequence[Pipeline], *, title: str = "", until_s: float | None = None) -> str:
    """Return the SVG of timelines one above the other, simulated or measured.

    Args:
        pipelines: what is drawn.
        title: the title, in bold above them.
        until_s: where their time axis ends; without it, where each timeline ends.
    """
    diagrams: list[_Diagram] = []
    room = WIDTH - 24.0 - _RIGHT
    rows = [text(24, 38, 19, title, bold=True, room=room)]
    bottom = 50.0 if title else 2.0
    for number, (name, caption, timeline) in enumerate(pipelines):
        diagram = _Diagram(timeline, bottom + 48, until_s, f"pipeline-{number}")
        rows += [
            text(24, bottom + 30, 18, name, bold=True),
            text(24 + room, bottom + 30, 16.5, caption, "soft", anchor="end", room=room),
            *diagram.rows(),
        ]
        bottom = diagram.bottom + 4
        diagrams.append(diagram)
    looks = {look for diagram in diagrams for look in diagram.looks}
    shades = "".join(
        rules(kind, diagram.segments, diagram.scope)
        for diagram in diagrams
        for kind in sorted(looks & HUES.keys())
    )
    last, most = diagrams[-1], max(diagrams, key=lambda diagram: diagram.segments)
    parts = (
        opening(title or "Pipeline diagram", ceil(last.bottom + 84), STYLE + shades),
        *rows,
        *last.axis(),
        *_legend(last.bottom + 48, looks, most),
        "</svg>\n",
    )
    return "".join(parts)


def caption_of(plan: Plan, timeline: Timeline) -> str:
    """Return a line with a plan's sizes and what the last iteration exposes, mean over ranks."""
    row = mean(exposure(timeline))
    exposed = (("DP.sync", row.grad_sync_s), ("PP.sync", row.p2p_s), ("copies", row.copy_s))
    peaks = peak_activations(plan)
    peak = f"{max(peaks)}" if len(set(peaks)) == 1 else f"{min(peaks)} to {max(peaks)}"
    parts = [
        f"p = {plan.num_ranks}",
        f"{plan.num_segments} segment{'s' * (plan.num_segments > 1)}",
        f"{plan.num_microbatches} micro-batches",
        f"bubble {row.share(row.bubble_s):.1%} of the time",
        *(f"exposed {what} {row.share(s):.1%}" for what, s in exposed if s > 0),
        f"peak activations {peak} per rank",
    ]
    return " · ".join(parts)


def draw_side_by_side(title: str, views: Sequence[View]) -> str:
    """Draw runs on one time axis, for a steady iteration of the slowest and a little more."""
    shown_s = _A_LITTLE_MORE * max(view.row.iteration.total_s for view in views)
    pipelines = []
    for view in views:
        ends_s = view.timeline.ends_s
        start_s = ends_s[0] if len(ends_s) > 1 else 0.0  # steady behind the first iteration
        shown = view.timeline.between(start_s, start_s + shown_s)
        pipelines.append(Pipeline(view.name, _shares(view.row.iteration), shown))
    return draw(pipelines, title=title, until_s=shown_s)


def _shares(row: Exposure) -> str:
    shares = (
        ("bubble", row.bubble_s),
        ("exposed DP.sync", row.grad_sync_s),
        ("exposed PP.sync", row.p2p_s),
    )
    of_it = (f"{what} {row.share(seconds):.0%}" for what, seconds in shares)
    return " · ".join((f"{row.total_s * 1e3:.0f} ms per iteration", *of_it))


class _Box(NamedTuple):
    """A rectangle of a lane and the words for it."""

    start_s: float
    end_s: float
    css: str
    label: str
    tooltip: str
    dark_text: bool


class _Diagram:
    """The coordinates of one diagram.

    Args:
        timeline: the timeline to draw.
        top: where its first rank is.
        until_s: where the time axis ends; by default with the timeline.
        scope: the CSS class of its shades, which are those of its own number of segments.
    """

    def __init__(self, timeline: Timeline, top: float, until_s: float | None, scope: str) -> None:
        self.timeline, self.top, self.until_s, self.scope = timeline, top, until_s, scope
        drawn = [span for spans in timeline.ranks for span in spans if span.lane is not Lane.P2P]
        self.lanes = {span.lane for span in drawn}
        self.looks = {"row", *map(_look, drawn)}
        self.segments = timeline.num_segments
        numbers = (s.action.microbatch for s in drawn if s.action and _names_microbatch(s.action))
        self.digits = len(str(max((n for n in numbers if n is not None), default=0)))
        self.tooltips = len(drawn) <= _MAX_TOOLTIPS
        self.last_s = max((span.end_s for span in drawn), default=0.0)  # no bubble after it
        self.end_s = until_s or self.last_s or 1.0
        self.per_s = (WIDTH - _LEFT - _RIGHT) / self.end_s

        ranks = max(1, timeline.num_ranks)
        self.row = min(30.0, max(4.0, 520 / ranks))
        self.thin_lanes = [lane for lane in _THIN_LANES if lane in self.lanes]
        self.thin = min(11.0, self.row / 2.5)
        self.space = min(2.0, self.row / 8)
        self.content = self.row + len(self.thin_lanes) * (self.thin + self.space)
        self.pitch = self.content + min(12.0, self.row / 3)
        self.bottom = self.top + (ranks - 1) * self.pitch + self.content
        units = ("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)  # of which the first reads well
        self.unit, self.unit_s = next((u for u in units if self.end_s >= u[1]), units[-1])

    def rows(self) -> Iterator[str]:
        """Yield what the ranks do."""
        yield f'<g class="{self.scope}">\n'
        yield from self._backgrounds()
        for x in map(self.x, self._ticks()):
            yield f'<path class="line" d="M{x:.1f} {self.top - 4:.1f}V{self.bottom + 6:.1f}"/>\n'
        for rank in range(self.timeline.num_ranks):
            yield from self._rank(rank)
        yield from self._iteration_ends()
        yield "</g>\n"

    def axis(self) -> Iterator[str]:
        """Yield the numbers below."""
        step_s = _tick_step(self.end_s)
        decimals = max(0, -floor(log10(step_s / self.unit_s) + 1e-9))
        y = self.bottom + 21
        for time_s in self._ticks():
            label = f"{time_s / self.unit_s:.{decimals}f}"
            yield text(self.x(time_s), y, 13.5, label, "soft", anchor="middle")
        yield text(_LEFT - 16, y, 13.5, f"time [{self.unit}]", "soft", anchor="end")

    def x(self, time_s: float) -> float:
        return _LEFT + time_s * self.per_s

    def lane_tops(self, rank: int) -> list[tuple[float, float]]:
        """The top and the height of a rank's row and of its thin lanes."""
        top = self.top + rank * self.pitch
        thin = self.thin + self.space
        first = top + self.row + self.space
        return [
            (top, self.row),
            *((first + i * thin, self.thin) for i in range(len(self.thin_lanes))),
        ]

    def _backgrounds(self) -> Iterator[str]:
        width = min(self.last_s, self.end_s) * self.per_s
        every = ceil(14 / self.pitch)
        for rank in range(self.timeline.num_ranks):
            for i, (top, height) in enumerate(self.lane_tops(rank)):
                yield rect(_LEFT, top, width, height, "thin" if i else "row")
            if rank % every == 0:
                size = min(14.5, max(9.0, self.row * 0.7))
                middle = self.top + rank * self.pitch + self.row / 2 + size * 0.36
                yield text(_LEFT - 12, middle, size, f"rank {rank}", anchor="end")

    def _ticks(self) -> Iterator[float]:
        step_s = _tick_step(self.end_s)
        yield from (i * step_s for i in range(floor(self.end_s / step_s + 1e-9) + 1))

    def _rank(self, rank: int) -> Iterator[str]:
        spans = self.timeline.ranks[rank]
        main, *thin = self.lane_tops(rank)
        for lane in (Lane.WAIT, Lane.OPTIMIZER, Lane.COMPUTE):
            if lane in self.lanes:
                yield from self._lane((s for s in spans if s.lane is lane), *main, 11.5)
        for lane, (top, height) in zip(self.thin_lanes, thin, strict=True):
            yield from self._lane(queued(s for s in spans if s.lane is lane), top, height, 8.5)

    def _lane(self, spans: Iterable[Span], top: float, height: float, size: float) -> Iterator[str]:
        for box in self._merged(map(self._box, spans)):
            x, width = self.x(box.start_s), (box.end_s - box.start_s) * self.per_s
            yield _filled_or_outlined(x, top, width, height, box.css, box.tooltip)
            label = box.label if height > size and box.label else ""
            # 9 and 10 alike: numbers that end in the middle of a row look like an end of the work.
            if label and max(len(label), self.digits) * size * _CHAR + 3 < width:
                css = "n on-light" if box.dark_text else "n on-dark"
                yield text(x + width / 2, top + height / 2 + size * 0.36, size, label, css)

    def _box(self, span: Span) -> _Box:
        look, tooltip = _look(span), ""
        if self.tooltips:
            start, end = span.start_s / self.unit_s, span.end_s / self.unit_s
            tooltip = f"{span.word}: {start:.4g} to {end:.4g} {self.unit}"
        if look not in HUES or span.action is None:
            return _Box(span.start_s, span.end_s, look, "", tooltip, True)
        segment = span.action.stage // self.timeline.num_ranks
        other = f"DP.sync {segment}" if look == "sync" else ""
        label = str(span.action.microbatch) if _names_microbatch(span.action) else other
        dark_text = takes_dark_text(look, segment, self.segments)
        css = css_class(look, segment)
        return _Box(span.start_s, span.end_s, css, label, tooltip, dark_text)

    def _merged(self, boxes: Iterable[_Box]) -> list[_Box]:
        """Join equal neighbours too narrow to tell apart, so that large plans make small files."""
        merged: list[_Box] = []
        for box in boxes:
            last = merged[-1] if merged else box._replace(css="")
            gap, width = box.start_s - last.end_s, box.end_s - box.start_s
            if box.css == last.css and gap * self.per_s < 0.4 and width * self.per_s < 1.5:
                merged[-1] = last._replace(end_s=box.end_s, label="", tooltip="")
            else:
                merged.append(box)
        return merged

    def _iteration_ends(self) -> Iterator[str]:
        for end_s in self.timeline.ends_s:
            if end_s == self.until_s:
                continue  # it was cut there
            x = self.x(end_s)
            yield (
                f'<path class="end" stroke-dasharray="4 3" '
                f'd="M{x:.1f} {self.top - 6:.1f}V{self.bottom + 6:.1f}"/>\n'
            )


def _legend(y: float, looks: Container[str], shown: _Diagram) -> Iterator[str]:
    entries = [
        ([css_class(look, s) for s in range(shown.segments)] if look in HUES else [look], name)
        for look, name in _LEGEND.items()
        if look in looks
    ]
    x = float(_LEFT)
    yield f'<g class="{shown.scope}">\n'
    for shades, name in entries:
        width = 17 if len(shades) < 4 else 9
        for css in shades:
            yield _filled_or_outlined(x, y, width, 14, css)
            x += width
        yield text(x + 6, y + 11.5, 12.5, name)
        x += 6 + len(name) * 12.5 * 0.5 + 26
    yield "</g>\n"
    if shown.segments > 1:
        order = "lighter to darker: first to last segment"
        below = 20 if x + len(order) * 12.5 * 0.5 > WIDTH - _RIGHT else 0
        yield text(WIDTH - _RIGHT, y + 11.5 + below, 12.5, order, "soft", anchor="end")


def _tick_step(end_s: float) -> float:
    """A round number of seconds that gives six to fifteen ticks."""
    power = 10.0 ** floor(log10(end_s / 6))
    return next(power * k for k in (5, 2, 1) if end_s / (power * k) >= 6 or k == 1)


def _look(span: Span) -> str:
    """What a span is drawn as: a key of `_LEGEND`."""
    if span.lane is Lane.OPTIMIZER:
        return "update"
    if span.action is None:
        return "row"
    if span.lane is Lane.WAIT:
        return "waits-p2p" if span.action.op in P2P_OPS else "waits-sync"
    return TABLE[span.action.op].kind


def _filled_or_outlined(
    x: float, y: float, width: float, height: float, css: str, tooltip: str = ""
) -> str:
    """Return a box; waiting is an outline, which lies inside the box."""
    if css in _OUTLINED:
        inset = min(0.75 + 0.45, width / 2)
        return rect(x + inset, y + 0.75, width - 2 * inset, height - 1.5, css, tooltip)
    inset = 0.45 if width > 4 else 0.0
    return rect(x + inset, y, width - 2 * inset, height, css, tooltip)


def _names_microbatch(action: Action) -> bool:
    return action.microbatch is not None and action.op not in PART_OPS
