"""A page for the browser that simulates schedules side by side, with sliders for their sizes.

The scripts in `web` make the plans and simulate them; a test compares them with our own. A plan
that they cannot make is shown as it is, above those that follow the sliders.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.fold3d.observe.exposure import exposure, mean
from megatron.fold3d.observe.report.palette import shades
from megatron.fold3d.observe.report.template import one_file
from megatron.fold3d.observe.timeline import LAYER_SYNCS, Lane, Span, Timeline

SCHEDULES = (
    *("1f1b", "interleaved", "aiao", "breadth-first", "afab", "shifted-critical-path"),
    *("zb-h1", "zb-h2"),
)
"""The schedules that the page knows."""
MOST_FORWARDS = 20_000
"""Forwards of a plan that a browser simulates while a slider moves."""
_SCRIPTS = ("model.js", "canvas.js", "schedules.js", "simulator.js", "playground.js")
_MOST_SEGMENTS = 6  # the slider's maximum


BEGIN: Mapping[str, Any] = {
    "p": 4,
    "m": 8,
    "ns": 3,
    "transfer": 0.04,
    "sync": 12.0,
    "where": "overlap",
    "ahead": 1,
    "gaps": False,
    "first": False,
    "shown": ("1f1b", "interleaved", "aiao"),
}
"""What the page shows first, by its own keys.

Times are multiples of one forward of one micro-batch through all layers of a rank: ``transfer``
is one message between ranks, ``sync`` DP.sync of all gradients of a rank. DP.sync is (``where``)
after all backwards (serial), behind them (overlap), or also behind the next iteration's forwards
(deferred). 1F1B runs ``ahead`` forwards per rank behind before its first backward. With ``gaps``,
schedules that do not place weight gradients compute them where a rank would wait. With ``first``,
PP.sync goes before DP.sync on a link; otherwise they share it fairly.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """A simulated plan that is shown as it is; sliders do not change it."""

    name: str
    timeline: Timeline
    peak_activations: tuple[int, ...]
    """Per rank, the most activations of a segment and a micro-batch at once."""


def playground(
    settings: Mapping[str, Any] = BEGIN,
    *,
    backward: float = 2.0,
    forward_s: float | None = None,
    presets: Mapping[str, Mapping[str, float]] | None = None,
    fixed: Fixed | None = None,
) -> str:
    """Return the page as HTML.

    Args:
        settings: as `BEGIN`.
        backward: a backward of a micro-batch, in forwards.
        forward_s: seconds of a forward; without it, times are shown as multiples.
        presets: settings of models on clusters, by the text of their button.
        fixed: a plan that is shown above those that follow the sliders.
    """
    most = max(_MOST_SEGMENTS, settings["ns"], fixed.timeline.num_segments if fixed else 1)
    data = {
        "settings": {**settings, "shown": [s for s in SCHEDULES if s in settings["shown"]]},
        "backward": backward,
        "forward_us": None if forward_s is None else 1e6 * forward_s,
        "palettes": {n: shades(n) for n in range(1, most + 1)},
        "presets": presets or {},
        "fixed": None if fixed is None else _columns(fixed, forward_s or 1.0),
    }
    forward = "the forward of one micro-batch through all layers of a rank"
    unit = (
        f"The unit of time is {forward}; a backward takes {backward:.3g} of it."
        if forward_s is None
        else f"A forward of one micro-batch through all layers of a rank takes {forward_s:.3g} s, "
        f"its backward {backward * forward_s:.3g} s."
    )
    return one_file(
        "playground.html",
        {"title": "Pipeline schedules, side by side", "unit": unit},
        data,
        styles=("style.css", "playground.css"),
        scripts=_SCRIPTS,
    )


def _columns(fixed: Fixed, unit_s: float) -> dict[str, Any]:
    """The last iteration of a timeline, as a result of the page's own simulation."""
    timeline = fixed.timeline
    row = mean(exposure(timeline))
    start_s = ([0.0, *timeline.iteration_ends_s(0)])[-2]
    times = {
        "compute": row.forward_s + row.backward_s + row.optimizer_s,
        "bubble": row.bubble_s + row.copy_s,
        "sync": row.grad_sync_s,
        "transfer": row.p2p_s,
    }
    return {
        "title": f"This command: {fixed.name}",
        "about": "As this command simulates it; it does not follow the sliders.",
        "ranks": [list(_spans(spans, start_s, unit_s)) for spans in timeline.ranks],
        "from": start_s / unit_s,
        "to": (start_s + timeline.period_s) / unit_s,
        "period": timeline.period_s / unit_s,
        "exposure": {name: seconds / unit_s for name, seconds in times.items()},
        "held": max(fixed.peak_activations) / timeline.num_segments,
        "ns": timeline.num_segments,
    }


def _spans(spans: tuple[Span, ...], start_s: float, unit_s: float) -> Iterator[dict[str, Any]]:
    for span in spans:
        hidden = span.lane in LAYER_SYNCS or (span.lane is Lane.WAIT and span.action is None)
        if span.end_s > start_s and not hidden:
            yield {
                "lane": "compute" if span.lane is Lane.OPTIMIZER else span.lane,
                "start": span.start_s / unit_s,
                "end": span.end_s / unit_s,
                "word": span.word,
            }
