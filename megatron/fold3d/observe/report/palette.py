"""Colors of the diagrams: a hue per kind of work, a shade per segment, on light and dark pages.

Forward and backward are blue and orange, which every eye tells apart.
"""

from colorsys import hls_to_rgb

HUES = {
    "forward": (211, 0.82, 0.38),
    "backward": (29, 0.95, 0.45),
    "recompute": (52, 0.70, 0.38),
    "weight": (140, 0.42, 0.36),
    "sync": (268, 0.52, 0.46),
    "copy": (176, 0.55, 0.30),
    "tp": (92, 0.45, 0.32),
    "p2p": (336, 0.62, 0.48),
}
"""Per kind: hue in degrees, saturation, and the lightness of the last segment."""

_LIGHTEST = 0.80

PLAIN = {
    "page": "#fff",
    "row": "#e9edf2",
    "thin": "#f4f6f8",
    "line": "#cfd5de",
    "ink": "#1b2330",
    "soft": "#566173",
    "update": "#939dab",
    "waits-sync": "#6a38b2",
    "waits-p2p": "#c72e69",
}
"""The colors that have no shades, on a light page."""

DARK = {
    "page": "#0d1117",
    "row": "#1e2632",
    "thin": "#19202a",
    "line": "#39434f",
    "ink": "#eef2f7",
    "soft": "#a6b1c1",
    "waits-sync": "#b794ee",
    "waits-p2p": "#f088b0",
}
"""The colors that differ on a dark page."""

DARK_TEXT, LIGHT_TEXT = "#14202f", "#fff"
"""Words in a box, whatever the page."""

SERIES = ("#2f81d6", "#d9791e", "#0f9d78", "#8a929c", "#a860c4", "#c2477b")
"""Bars and lines by number, on any page: ours is the first. Told apart without red and green."""


def shades(num_segments: int) -> dict[str, list[str]]:
    """Return the CSS colors of each kind of work, segment by segment."""
    return {kind: [color(kind, s, num_segments) for s in range(num_segments)] for kind in HUES}


def text_on(kind: str, segment: int, num_segments: int) -> str:
    """Return the color of words that read better on a shade (WCAG's relative luminance)."""
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in _rgb(kind, segment, num_segments)
    ]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return DARK_TEXT if luminance > 0.26 else LIGHT_TEXT


def color(kind: str, segment: int, num_segments: int) -> str:
    """Return the CSS color of a kind of work in a segment."""
    return "#" + "".join(f"{round(255 * c):02x}" for c in _rgb(kind, segment, num_segments))


def _rgb(kind: str, segment: int, num_segments: int) -> tuple[float, float, float]:
    hue, saturation, darkest = HUES[kind]
    depth = segment / (num_segments - 1) if num_segments > 1 else 0.45
    return hls_to_rgb(hue / 360, _LIGHTEST + (darkest - _LIGHTEST) * depth, saturation)
