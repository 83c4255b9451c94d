"""A page for the browser: the pipeline diagram to zoom into, and the tables that go with it.

The page is one file that loads nothing from outside. Python writes the tables and the bars; the
scripts in `web` draw the diagram from the spans, which are embedded as columns.
"""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import chain
from json import JSONEncoder
from pathlib import Path
from string import Template
from typing import Any

from megatron.fold3d.observe.breakdown import COLUMNS, Breakdown, View, table_ii
from megatron.fold3d.observe.critical_path import PathStep, critical_path, path_seconds
from megatron.fold3d.observe.report.palette import DARK_TEXT, color, shades, text_on
from megatron.fold3d.observe.timeline import Lane, by_row, queued
from megatron.fold3d.plan.ir import gc_paused
from megatron.fold3d.plan.ops import TABLE

_SCRIPTS = ("model.js", "canvas.js", "paint.js", "view.js")
_US = 1e6
_KINDS = {
    "forward_s": "forward",
    "backward_s": "backward",
    "grad_sync_s": "sync",
    "p2p_s": "p2p",
    "copy_s": "copy",
}
# How a column is painted in a bar; what is not here has the color of an empty row.
_PAINTS = {"optimizer_s": f"background:var(--update);color:{DARK_TEXT}"} | {
    field: f"background:{color(kind, 0, 1)};color:{text_on(kind, 0, 1)}"
    for field, kind in _KINDS.items()
}
_ALIGN = (
    '<button id="align" aria-pressed="true" title="begin iterations of the same number together">'
    "Align iterations</button>"
)
_PATH_NAMES = {**COLUMNS, "idle_s": "idle"}


@gc_paused()
def page(
    title: str,
    caption: str,
    views: Sequence[View],
    *,
    speeds: Sequence[Sequence[str]] = (),
    gain: str | None = None,
) -> str:
    """Return the page as HTML.

    Args:
        views: the first is the one that the tiles are about.
        speeds: the rows of a table about all iterations, not only the traced ones; titles first.
        gain: of the first view over stock of the same layout, in words, if that is shown too.
    """
    paths = [critical_path(view.timeline) for view in views]
    toggles = [
        f'<button data-view="{i}" aria-pressed="true">{escape(_capital(view.name))}</button>'
        for i, view in enumerate(views)
    ]
    if min(len(view.timeline.iteration_ends_s(0)) for view in views) > 1:
        toggles.append(_ALIGN)
    num_segments = max(view.timeline.num_segments for view in views)
    data = {
        "num_ranks": views[0].timeline.num_ranks,
        "num_segments": num_segments,
        "palette": shades(num_segments),
        "views": [_columns(view, path) for view, path in zip(views, paths, strict=True)],
    }
    to_json = JSONEncoder(separators=(",", ":")).encode
    return Template(_read("page.html")).substitute(
        title=escape(title),
        caption=escape(caption),
        tiles="".join(_tiles(views, gain)),
        toggles="".join(toggles) if len(views) > 1 else "",
        sections="".join(
            chain(_speed_section(speeds), _time_section(views), _path_section(views, paths))
        ),
        style=_read("style.css"),
        script="\n".join((f"const OPS = {to_json(for_scripts())};", *map(_read, _SCRIPTS))),
        # No text of a trace may end the element that it is in, or begin a comment there.
        data=to_json(data).replace("<", "\\u003c"),
    )


def for_scripts() -> dict[str, dict[str, str]]:
    """Return what the page's scripts know of each op, by its spelling."""
    return {
        op.rstrip(":"): {"kind": row.kind, "title": row.title, "waits": row.waits}
        for op, row in TABLE.items()
    }


def _read(name: str) -> str:
    return (Path(__file__).parent / "web" / name).read_text(encoding="utf-8")


def _columns(view: View, path: Sequence[PathStep]) -> dict[str, Any]:
    """The spans of each lane as three columns, and where among them the critical path is."""
    lanes = [by_row(spans) for spans in view.timeline.ranks]
    for of_rank in lanes:
        of_rank[Lane.GRAD_SYNC].sort(key=lambda span: span.end_s)
    used = {name for of_rank in lanes for name, spans in of_rank.items() if spans}
    index = {
        (rank, span): (name, i)
        for rank, of_rank in enumerate(lanes)
        for name, spans in of_rank.items()
        for i, span in enumerate(spans)
    }
    for of_rank in lanes:
        of_rank[Lane.GRAD_SYNC] = queued(of_rank[Lane.GRAD_SYNC])
    return {
        "name": view.name,
        "ends": [round(end_s * _US, 1) for end_s in view.timeline.ends_s],
        "path": [(step.rank, *index[step.rank, step.span]) for step in path],
        "ranks": [
            {
                name: {
                    "start": [round(span.start_s * _US, 1) for span in spans],
                    "end": [round(span.end_s * _US, 1) for span in spans],
                    "word": [span.word for span in spans],
                }
                for name, spans in of_rank.items()
                if name in used or name is Lane.COMPUTE
            }
            for of_rank in lanes
        ],
    }


def _tiles(views: Sequence[View], gain: str | None) -> Iterator[str]:
    row, others = views[0].row, views[1:]
    exposed = {
        "bubble_s": "of an iteration is bubble",
        "grad_sync_s": "is exposed DP.sync",
        "p2p_s": "is exposed PP.sync",
    }

    def tile(text: str, name: str, *compared: str) -> str:
        beside = "".join(
            f"; {escape(v.name)} {other}" for other, v in zip(compared, others, strict=True)
        )
        return f"<li><b>{text}</b><span>{name}{beside}</span></li>"

    times = [view.time(view.row.iteration.total_s) for view in views]
    of_run = f"{escape(views[0].name)}, per iteration" if others else "per iteration"
    yield tile(times[0], of_run, *times[1:])
    if gain is not None:
        yield f"<li><b>{gain}</b><span>than stock of the same layout</span></li>"
    for field, name in exposed.items():
        shares = (view.row.iteration.share(getattr(view.row.iteration, field)) for view in views)
        share, *others_share = [f"{share:.1%}" for share in shares]
        yield tile(share, name, *others_share)
    if row.flops is not None:
        used = f", {row.utilisation:.1%} of peak" if row.utilisation is not None else ""
        name = f"TFLOP/s of the model per GPU{used}"
        yield f"<li><b>{row.flops.model / 1e12:.1f}</b><span>{name}</span></li>"


def _capital(name: str) -> str:
    return name[:1].upper() + name[1:]


def _speed_section(speeds: Sequence[Sequence[str]]) -> Iterator[str]:
    if not speeds:
        return
    yield '<section aria-labelledby="speed"><h2 id="speed">How fast</h2>'
    yield f"{_table(*speeds)}</section>"


def _time_section(views: Sequence[View]) -> Iterator[str]:
    rows = [view.row for view in views]
    yield '<section aria-labelledby="time"><h2 id="time">Where the time goes</h2>'
    yield '<p class="soft small">An iteration, mean over ranks: the columns of the FOLD3D paper’s '
    yield "Table II. DP.sync and PP.sync count what no computation hides.</p>"
    yield from _bars((view, view.row.iteration._asdict(), COLUMNS) for view in views)
    titles, times_s = table_ii(*(row.iteration for row in rows))
    extra = list(_extra_columns(rows))
    yield _table(
        ["ms", *titles, *(name for name, _ in extra)],
        *(
            [view.name, *map(view.ms, times_s[i]), *(texts[i] for _, texts in extra)]
            for i, view in enumerate(views)
        ),
    )
    for view in views:
        yield f"<details><summary>{escape(_capital(view.name))}, each rank</summary>"
        titles, times_s = table_ii(*view.row.of_rank)
        cells = ((f"rank {n}", *map(view.ms, of_rank)) for n, of_rank in enumerate(times_s))
        yield _table(["ms", *titles], *cells)
        yield "</details>"
    yield "</section>"


def _extra_columns(rows: Sequence[Breakdown]) -> Iterator[tuple[str, list[str]]]:
    """The quantities other than time that any row knows."""
    columns = (
        ("GPU GiB", [(r.device_bytes, 2**30, ".1f") for r in rows]),
        ("host GiB", [(r.host_bytes, 2**30, ".1f") for r in rows]),
        ("offloaded GiB", [(r.offloaded_bytes, 2**30, ".3g") for r in rows]),
        ("deferred", [(r.deferred_share, 1, ".1%") for r in rows]),
        ("model TFLOP/s", [(r.flops and r.flops.model, 1e12, ".1f") for r in rows]),
        ("hardware TFLOP/s", [(r.flops and r.flops.hardware, 1e12, ".1f") for r in rows]),
        ("utilisation", [(r.utilisation, 1, ".1%") for r in rows]),
    )
    for name, values in columns:
        if any(value is not None for value, _, _ in values):
            texts = [
                "–" if value is None else format(value / unit, form) for value, unit, form in values
            ]
            yield name, texts


def _table(titles: Sequence[str], *rows: Sequence[str]) -> str:
    """Return a table; the first cell of a row names it."""
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for name, *cells in rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll">{table}</div>'


def _path_section(views: Sequence[View], paths: Sequence[Sequence[PathStep]]) -> Iterator[str]:
    yield '<section aria-labelledby="why"><h2 id="why">The critical path</h2>'
    yield '<p class="soft small">The chain of work and transfers that made the run as long as it '
    yield "is, from its end backwards. Making anything else faster gains nothing.</p>"
    yield from _bars(
        (view, path_seconds(path), _PATH_NAMES) for view, path in zip(views, paths, strict=True)
    )
    yield "</section>"


def _bars(rows: Iterator[tuple[View, dict[str, float], dict[str, str]]]) -> Iterator[str]:
    """A bar per row, all on one scale."""
    known = list(rows)
    longest_s = max(sum(times_s.values()) for _, times_s, _ in known) or 1.0
    yield '<div class="shares">'
    for view, times_s, titles in known:
        total_s = sum(times_s.values())
        yield f"<span>{escape(view.name)}</span>"
        yield f'<div><div class="stack" style="width:{100 * total_s / longest_s:.2f}%">'
        for field, title in titles.items():
            if (time_s := times_s.get(field, 0)) > 0:
                share = time_s / total_s
                paint = _PAINTS.get(field, "background:var(--row);color:var(--soft)")
                tip = escape(f"{title}: {view.time(time_s)}, {share:.1%}")
                yield f'<div style="width:{100 * share:.3f}%;{paint}" title="{tip}">'
                yield f"<span>{title} {share:.1%}</span></div>"
        yield f'</div></div><span class="of">{view.time(total_s)}</span>'
    yield "</div>"
