"""Pages for the browser as one file that loads nothing from outside, from the parts in `web`."""

from collections.abc import Mapping, Sequence
from json import JSONEncoder
from pathlib import Path
from typing import Any

from megatron.fold3d.plan.ops import for_pages

_WEB = Path(__file__).parent / "web"


def one_file(
    template: str,
    parts: Mapping[str, str],
    data: Mapping[str, Any],
    *,
    styles: Sequence[str],
    scripts: Sequence[str],
) -> str:
    """Return a page: a template with its ``{{parts}}``, its style, scripts and data filled in.

    Args:
        template: the name of a file in `web`, as styles and scripts are.
        parts: HTML, by the name of its place.
        data: the data that the scripts read.
        styles: go into ``{{style}}``, in this order.
        scripts: go into ``{{script}}``, in this order, behind ``OPS`` from `ops.for_pages`.
    """
    to_json = JSONEncoder(separators=(",", ":")).encode
    parts = {
        **parts,
        "style": "".join(map(_read, styles)),
        "script": "\n".join((f"const OPS = {to_json(for_pages())};", *map(_read, scripts))),
        # No text of a trace may end the element that it is in, or begin a comment there.
        "data": to_json(data).replace("<", "\\u003c"),
    }
    head, *rest = _read(template).split("{{")
    filled = (parts[name] + text for name, text in (part.split("}}", 1) for part in rest))
    return head + "".join(filled)


def _read(name: str) -> str:
    return (_WEB / name).read_text(encoding="utf-8")
