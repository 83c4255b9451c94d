"""The columns of the paper's Table II, as the lines that commands print."""

from collections.abc import Iterable, Sequence

from megatron.fold3d.observe.breakdown import COLUMNS

_WIDTH = 10


def titles(label: str, shown: Sequence[str]) -> str:
    """Return the line of titles; ``label`` is what stands before them, as wide as in `line`."""
    names = [*(COLUMNS[name] for name in shown), "total"]
    return label + "".join(f"{name:>{_WIDTH}}" for name in names)


def line(label: str, values: Iterable[float], form: str = ".4g") -> str:
    """Return a line of values, the columns' and the total, each in the form of ``format``."""
    return label + "".join(f"{format(value, form):>{_WIDTH}}" for value in values)
