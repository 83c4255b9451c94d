"""The elements that our SVG files are made of: a page with a title, rectangles, and text.

Files are self-contained, and equal input gives equal bytes.
"""

from html import escape
from math import inf
from typing import Literal

WIDTH = 1200
Anchor = Literal["start", "middle", "end"]
_CHAR, _BOLD_CHAR = 0.53, 0.62  # width of a character over the font size, in the widest fonts


def opening(title: str, height: int, style: str) -> str:
    """Return the beginning of a file `WIDTH` wide: its title, its style, and the page."""
    name = escape(title, quote=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" aria-label="{name}">\n'
        f"<title>{name}</title>\n<style>{style}</style>\n"
        f'<rect class="page" width="{WIDTH}" height="{height}" rx="10"/>\n'
    )


def rect(x: float, y: float, width: float, height: float, css: str, tooltip: str = "") -> str:
    """Return a rectangle of a CSS class."""
    inside = f"><title>{escape(tooltip)}</title></rect>\n" if tooltip else "/>\n"
    return (
        f'<rect class="{css}" x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.3):.2f}" '
        f'height="{height:.1f}"{inside}'
    )


def text(
    x: float,
    y: float,
    size: float,
    words: str,
    css: str = "ink",
    *,
    anchor: Anchor = "start",
    bold: bool = False,
    room: float = inf,
) -> str:
    """Return words on a baseline, in a CSS class; ``anchor`` is where in them ``x`` lies.

    Words that take more than ``room`` at this ``size`` are smaller.
    """
    if not words:
        return ""
    size = min(size, round(room / (len(words) * (_BOLD_CHAR if bold else _CHAR)), 1))
    place = f'x="{x:.2f}" y="{y:.1f}" font-size="{size:g}"'
    weight = ' font-weight="bold"' if bold else ""
    side = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text class="{css}" {place}{weight}{side}>{escape(words)}</text>\n'
