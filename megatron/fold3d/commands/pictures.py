"""Plots, which matplotlib draws: an extra, so that who asks for no picture needs no library."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from logging import ERROR, getLogger
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NO_PICTURE = "no picture without matplotlib: pip install '.[plots]' in the checkout of FOLD3D"

Lines = Mapping[str, Sequence[tuple[float, float]]]
"""The points of each line, by its name."""


def figure(asked: str, width: float, height: float) -> "Figure":
    """Return an empty picture; ``asked`` is the option that asks for it.

    Raises:
        ValueError: matplotlib is not installed.
    """
    getLogger("matplotlib.font_manager").setLevel(ERROR)  # at first it says that it makes a cache
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(f"{asked}: {NO_PICTURE}") from None
    return Figure(figsize=(width, height), layout="constrained")


def plot_losses(title: str, panels: Mapping[str, Lines], kind: str = "svg") -> bytes:
    """Return losses in plots side by side, an SVG or a ``png``; equal losses give equal bytes.

    Args:
        title: stands above them.
        panels: the lines of each plot, the same names in all, by the name of its axis.

    Raises:
        ValueError: matplotlib is not installed.
    """
    picture = figure("--svg", 12, 4.4)
    picture.suptitle(title, x=0.01, ha="left", weight="bold")
    for axes, (over, lines) in zip(picture.subplots(1, len(panels)), panels.items(), strict=True):
        axes.set(xlabel=over, ylabel="loss")
        axes.grid(color="0.9")
        for number, (name, points) in enumerate(lines.items()):
            # Where lines lie on each other, the ones below shine through the gaps of those above.
            style = "--" if number else "-"
            x, y = [x for x, _ in points], [y for _, y in points]
            axes.plot(x, y, style, label=name, gid=f"{name} over {over}")
    picture.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=6)
    return as_bytes(picture, title, kind)


def as_bytes(picture: "Figure", title: str, kind: str = "svg") -> bytes:
    """Return a picture as a file: equal ones give equal bytes, and the text of an SVG is text."""
    from matplotlib import rc_context

    written = BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        picture.savefig(written, format=kind, metadata={"Date": None, "Title": title})
    return written.getvalue()
