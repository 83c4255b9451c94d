"""Plots, which matplotlib draws: an extra, so that who asks for no picture needs no library.

All pictures have one width, one size of words, and the colors of `palette`. An SVG follows its
reader's choice of a light or a dark page.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from logging import ERROR, getLogger
from typing import TYPE_CHECKING, Any

from megatron.fold3d.observe.report.palette import DARK, PLAIN, SERIES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NO_PICTURE = "no picture without matplotlib: pip install '.[plots]' in the checkout of FOLD3D"
WIDTH, SIZE = 560.0, 12.0
"""Of a picture and of its words, in points: words are 9 pixels high where a phone shows it."""
CHAR = 0.57
"""Width of a character over the font size."""

_STYLE: Mapping[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fold3d",  # equal pictures are equal files
    "font.sans-serif": ("DejaVu Sans", "Verdana", "Helvetica"),
    "font.size": SIZE,
    "axes.titlesize": SIZE,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "figure.facecolor": PLAIN["page"],
    "axes.facecolor": "none",
    "axes.edgecolor": PLAIN["line"],
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.axisbelow": True,
    "axes.labelcolor": PLAIN["soft"],
    "xtick.color": PLAIN["line"],
    "ytick.color": PLAIN["line"],
    "xtick.labelcolor": PLAIN["ink"],
    "ytick.labelcolor": PLAIN["ink"],
    "text.color": PLAIN["ink"],
    "grid.color": PLAIN["line"],
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "figure.constrained_layout.w_pad": 8 / 72,
    "figure.constrained_layout.h_pad": 8 / 72,
}

Lines = Mapping[str, Sequence[tuple[float, float]]]
"""The points of each line, by its name."""


@contextmanager
def figure(asked: str, height: float) -> Iterator["Figure"]:
    """Yield an empty picture, to be drawn and written in our style while the context lasts.

    Args:
        asked: the option that asks for the picture.
        height: in points.

    Raises:
        ValueError: matplotlib is not installed.
    """
    getLogger("matplotlib.font_manager").setLevel(ERROR)  # at first it says that it makes a cache
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(f"{asked}: {NO_PICTURE}") from None
    with rc_context(dict(_STYLE)):
        picture = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
        picture.patch.set_gid("page")
        yield picture


def plot_losses(title: str, panels: Mapping[str, Lines]) -> bytes:
    """Return the SVG of losses in plots one above the other; equal losses give equal bytes.

    Args:
        panels: the lines of each plot, the same names in all, by the name of its axis.
    """
    with figure("--svg", 240 * len(panels) + 100) as picture:
        picture.suptitle(title, x=0.01, ha="left", weight="bold", size=SIZE)
        plots = picture.subplots(len(panels), 1)
        for axes, (over, lines) in zip(plots, panels.items(), strict=True):
            are_equal = len(lines) > len({tuple(points) for points in lines.values()}) == 1
            axes.set(xlabel=over + "; all lines are equal" * are_equal, ylabel="loss")
            axes.set_prop_cycle(color=SERIES)
            axes.grid()
            for number, (name, points) in enumerate(lines.items()):
                # Where lines lie on each other, those below show in the gaps of those above.
                style = "-" if not number else "--" if number < len(SERIES) else ":"
                x, y = [x for x, _ in points], [y for _, y in points]
                axes.plot(x, y, style, label=name, gid=f"{name} over {over}")
        picture.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
        return as_bytes(picture, title)


def as_bytes(picture: "Figure", title: str, description: str | None = None) -> bytes:
    """Return a picture as an SVG whose text is text, and whose plain colors follow the page's."""
    written = BytesIO()
    metadata = {"Date": None, "Title": title, "Description": description}
    picture.savefig(written, format="svg", metadata=metadata)
    rules = [
        f'[style*="{what}: {PLAIN[name]}"] {{{what}: {dark} !important}}'
        for name, dark in DARK.items()
        if name != "page"  # whose color words in dark boxes have on any page
        for what in ("fill", "stroke")
    ]
    page = f"#page path {{fill: {DARK['page']} !important}}"
    media = f"@media (prefers-color-scheme: dark) {{{' '.join((page, *rules))}}}</style>"
    return written.getvalue().replace(b"</style>", media.encode(), 1)
