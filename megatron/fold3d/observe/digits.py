"""Numbers as people read them: three digits of what is predicted, four of what is measured."""


def digits(number: float) -> str:
    """Return a number rounded to three significant digits: ``0.250``, ``3.10``, ``12,300``."""
    rounded = float(f"{number:.3g}")
    if not rounded:
        return "0"
    return f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{rounded:#.3g}"


def seconds(time_s: float) -> str:
    """Return a time with its unit: ``3.10 s``, or ``45.0 ms``."""
    return f"{digits(time_s)} s" if not 0 < time_s < 0.1 else f"{digits(1e3 * time_s)} ms"


def milliseconds(time_s: float, sign: str = "-") -> str:
    """Return measured milliseconds, with four digits or all of those before the point.

    Args:
        sign: ``+`` shows the sign of a gain too.
    """
    ms = 1e3 * time_s
    return f"{ms:{sign}.0f}" if abs(ms) >= 1e3 else f"{ms:{sign}.4g}"
