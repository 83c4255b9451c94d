"""Draw a timeline as a pipeline diagram (paper Fig. 4): one self-contained SVG.

A row per rank shows forwards and backwards as boxes with their micro-batch, in a hue per direction
and a shade per segment. DP.sync and copies are in thin lanes below. Waits for DP.sync or sends are
outlines in the color of what is waited for. Where the background shows, the rank is idle.
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from math import ceil, floor, log10
from typing import NamedTuple

from megatron.fold3d.observe.exposure import exposure, mean
from megatron.fold3d.observe.report.palette import STYLE, css_class, rules, takes_dark_text
from megatron.fold3d.observe.report.svg import WIDTH, opening, rect, text
from megatron.fold3d.observe.timeline import Lane, Span, Timeline, queued
from megatron.fold3d.plan.ir import Action, Plan
from megatron.fold3d.plan.memory import peak_activations
from megatron.fold3d.plan.ops import P2P_OPS, PART_OPS, TABLE

_LEFT, _RIGHT = 78, 28
_NAMES = {
    "recompute": "recomputation",
    "weight": "weight gradient",
    "sync": "DP.sync",
    "copy": "host copy",
}
_WAITS = {"waits-sync": "DP.sync", "waits-p2p": "sends"}
_THIN_LANES = (Lane.GRAD_SYNC, Lane.COPY)
_MAX_TOOLTIPS = 1500
_CHAR = 0.6  # width of a character over the font size
_BOLD_CHAR = 0.62  # the same of bold words, in the widest of the fonts


def draw(timeline: Timeline, *, title: str = "", caption: str = "") -> str:
    """Return the SVG of a timeline.

    Args:
        timeline: simulated or measured.
        title: the title, in bold above the diagram.
        caption: a line below the title; `caption_of` makes one.
    """
    diagram = _Diagram(timeline, top=26.0 + 30 * bool(title) + 24 * bool(caption))
    return _document(title, caption, [diagram], diagram.rows())


class Pipeline(NamedTuple):
    """A timeline among others, and the words above it."""

    name: str
    caption: str
    timeline: Timeline


def draw_together(pipelines: Sequence[Pipeline], *, title: str, until_s: float) -> str:
    """Return the SVG of timelines one above the other, on a time axis that ends at ``until_s``."""
    diagrams: list[_Diagram] = []
    rows: list[str] = []
    bottom = 50.0
    for number, (name, caption, timeline) in enumerate(pipelines):
        diagram = _Diagram(timeline, bottom + 48, until_s, scope=f"pipeline-{number}")
        rows += [
            text(24, bottom + 30, 18, name, bold=True),
            text(WIDTH - _RIGHT, bottom + 30, 16.5, caption, "soft", anchor="end"),
            *diagram.rows(),
        ]
        bottom = diagram.bottom + 4
        diagrams.append(diagram)
    return _document(title, "", diagrams, rows)


def _document(title: str, caption: str, diagrams: Sequence["_Diagram"], rows: Iterable[str]) -> str:
    """Return diagrams with the words above all of them, and the axis and the legend below."""
    kinds = {kind for diagram in diagrams for kind in diagram.kinds}
    lanes = {lane for diagram in diagrams for lane in diagram.lanes}
    waits_for = {what for diagram in diagrams for what in diagram.waits_for}
    shades = "".join(
        rules(kind, diagram.segments, diagram.scope)
        for diagram in diagrams
        for kind in sorted(kinds)
    )
    last, most = diagrams[-1], max(diagrams, key=lambda diagram: diagram.segments)
    parts = (
        opening(title or "Pipeline diagram", ceil(last.bottom + 84), STYLE + shades),
        *_headings(title, caption),
        *rows,
        *last.axis(),
        *_legend(last.bottom + 48, kinds, lanes, waits_for, most),
        "</svg>\n",
    )
    return "".join(parts)


def _headings(title: str, caption: str) -> Iterator[str]:
    if title:
        size = min(19.0, (WIDTH - 24 - _RIGHT) / (len(title) * _BOLD_CHAR))
        yield text(24, 38, round(size, 1), title, bold=True)
    if caption:
        size = min(13.5, (WIDTH - 24 - _RIGHT) / (len(caption) * 0.53))
        yield text(24, 34 + 28 * bool(title), round(size, 1), caption, "soft")


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
        scope: the CSS class of its shades, where there are other diagrams.
    """

    def __init__(
        self, timeline: Timeline, top: float, until_s: float | None = None, scope: str = ""
    ) -> None:
        self.timeline, self.top, self.until_s, self.scope = timeline, top, until_s, scope
        drawn = [span for spans in timeline.ranks for span in spans if span.lane is not Lane.P2P]
        self.lanes = {span.lane for span in drawn}
        self.waits_for = {_awaited(s.action) for s in drawn if s.lane is Lane.WAIT and s.action}
        self.kinds = {
            TABLE[s.action.op].kind
            for s in drawn
            if s.action and s.lane not in (Lane.WAIT, Lane.OPTIMIZER)
        }
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
        self.unit, self.unit_s = _unit(self.end_s)

    def rows(self) -> Iterator[str]:
        """Yield what the ranks do."""
        yield f'<g class="{self.scope}">\n'
        yield from self._backgrounds()
        yield from self._grid()
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

    def _grid(self) -> Iterator[str]:
        for x in map(self.x, self._ticks()):
            yield f'<path class="line" d="M{x:.1f} {self.top - 4:.1f}V{self.bottom + 6:.1f}"/>\n'

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
        if span.action is None or span.lane is Lane.WAIT or span.lane is Lane.OPTIMIZER:
            awaited = _awaited(span.action) if span.lane is Lane.WAIT and span.action else ""
            css = "update" if span.lane is Lane.OPTIMIZER else awaited or "row"
            return _Box(span.start_s, span.end_s, css, "", self._tooltip(span), True)
        stage, op, microbatch = span.action
        kind, segment = TABLE[op].kind, stage // self.timeline.num_ranks
        other = f"DP.sync {segment}" if kind == "sync" else ""
        label = str(microbatch) if _names_microbatch(span.action) else other
        dark_text = takes_dark_text(kind, segment, self.segments)
        css = css_class(kind, segment)
        return _Box(span.start_s, span.end_s, css, label, self._tooltip(span), dark_text)

    def _tooltip(self, span: Span) -> str:
        if not self.tooltips:
            return ""
        start, end = span.start_s / self.unit_s, span.end_s / self.unit_s
        return f"{span.word}: {start:.4g} to {end:.4g} {self.unit}"

    def _merged(self, boxes: Iterable[_Box]) -> Iterator[_Box]:
        """Join equal neighbours too narrow to tell apart, so that large plans make small files."""
        last: _Box | None = None
        for box in boxes:
            if last is not None:
                gap = (box.start_s - last.end_s) * self.per_s
                if (
                    box.css == last.css
                    and gap < 0.4
                    and (box.end_s - box.start_s) * self.per_s < 1.5
                ):
                    last = last._replace(end_s=box.end_s, label="", tooltip="")
                    continue
                yield last
            last = box
        if last is not None:
            yield last

    def _iteration_ends(self) -> Iterator[str]:
        ranks = range(self.timeline.num_ranks)
        ends = [self.timeline.iteration_ends_s(rank) for rank in ranks]
        for end_s in map(max, zip(*ends, strict=False)):
            if end_s == self.until_s:
                continue  # it was cut there
            x = self.x(end_s)
            yield (
                f'<path class="end" stroke-dasharray="4 3" '
                f'd="M{x:.1f} {self.top - 6:.1f}V{self.bottom + 6:.1f}"/>\n'
            )


def _legend(
    y: float,
    kinds: Container[str],
    lanes: Container[Lane],
    waits_for: Container[str],
    shown: _Diagram,
) -> Iterator[str]:
    entries: list[tuple[list[str], str]] = []
    for kind in ("forward", "recompute", "backward", "weight", "sync", "copy"):
        if kind in kinds:
            shades = [css_class(kind, segment) for segment in range(shown.segments)]
            entries.append((shades, _NAMES.get(kind, kind)))
    entries += [([css], f"waits for {what}") for css, what in _WAITS.items() if css in waits_for]
    if Lane.OPTIMIZER in lanes:
        entries.append((["update"], "optimizer"))
    entries.append((["row"], "bubble"))
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


def _unit(end_s: float) -> tuple[str, float]:
    """The unit in which a time reads best, and its seconds."""
    return next((pair for pair in (("s", 1.0), ("ms", 1e-3)) if end_s >= pair[1]), ("µs", 1e-6))


def _tick_step(end_s: float) -> float:
    """A round number of seconds that gives six to fifteen ticks."""
    power = 10.0 ** floor(log10(end_s / 6))
    return next(power * k for k in (5, 2, 1) if end_s / (power * k) >= 6 or k == 1)


def _awaited(action: Action) -> str:
    """The CSS class of waiting for an action."""
    return "waits-p2p" if action.op in P2P_OPS else "waits-sync"


def _filled_or_outlined(
    x: float, y: float, width: float, height: float, css: str, tooltip: str = ""
) -> str:
    """Return a box; waiting is an outline, which lies inside the box."""
    if css in _WAITS:
        inset = min(0.75 + 0.45, width / 2)
        return rect(x + inset, y + 0.75, width - 2 * inset, height - 1.5, css, tooltip)
    inset = 0.45 if width > 4 else 0.0
    return rect(x + inset, y, width - 2 * inset, height, css, tooltip)


def _names_microbatch(action: Action) -> bool:
    return action.microbatch is not None and action.op not in PART_OPS
