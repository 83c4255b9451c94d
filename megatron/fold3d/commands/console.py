"""Output of commands: results on stdout, so that they can be piped, everything else on stderr."""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from itertools import chain, product
from string import ascii_uppercase
from time import monotonic

OK, REJECTED = 0, 1


def write(text: str) -> None:
    """Write to stdout; a reader that closes the pipe (``| head``) is not an error."""
    try:
        print(text, end="", flush=True)  # noqa: T201
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit


def counted(number: int, things: str) -> str:
    """Return ``1 rank`` or ``2 ranks``."""
    one = things.removesuffix("es" if things.endswith("ches") else "s")
    return f"{number} {one if number == 1 else things}"


def faster(gain: float) -> str:
    """Return ``3.0% faster`` or ``1.2% slower``: the one spelling of a gain."""
    return f"{abs(gain):.1%} {'slower' if gain < 0 else 'faster'}"


def faster_between(low: float, high: float) -> str:
    """Return ``3.0% to 5.0% faster``, or ``1.2% slower to 0.4% faster``: a range of gains."""
    least = f"{abs(low):.1%}" if (low < 0) == (high < 0) else faster(low)
    return f"{least} to {faster(high)}"


def table(rows: Iterable[Sequence[str]], *, left: int = 1) -> Iterator[str]:
    """Yield rows of cells as lines in which columns are aligned.

    Args:
        left: how many columns begin flush left; the others are numbers, and end flush right.
    """
    known = [*rows]
    widths = [max(map(len, column)) for column in zip(*known, strict=True)]
    forms = [f"{'<' if number < left else '>'}{width}" for number, width in enumerate(widths)]
    for row in known:
        yield "  ".join(map(format, row, forms)).rstrip()


def lettered(names: Iterable[str]) -> list[str]:
    """Return names with a letter before each, so that equal names can be told apart."""
    letters = chain(ascii_uppercase, map("".join, product(ascii_uppercase, repeat=2)))
    return [f"{letter} {name}" for letter, name in zip(letters, names, strict=False)]


def complain(message: str) -> None:
    """Write a line to stderr."""
    print(message, file=sys.stderr, flush=True)  # noqa: T201


def suggestion(words: Iterable[str], known: Iterable[str]) -> str:
    """Return ``; did you mean ...?`` for words that resemble known ones, or nothing.

    A word may also be the beginning of a known one.
    """
    choices, near = sorted(known), list[str]()
    for word in (word.partition("=")[0] for word in words):
        begun = [choice for choice in choices if len(word) > 3 and choice.startswith(word)]
        near += get_close_matches(word, choices, 1, 0.75) or (begun if len(begun) <= 3 else ())
    return f"; did you mean {', '.join(near)}?" if near else ""


class Progress:
    """Says on stderr every few seconds how many candidates are simulated.

    Most of the remaining candidates are ruled out at once, so no remaining time is predicted.
    """

    EVERY_S = 5.0

    def __init__(self) -> None:
        self._start_s = monotonic()
        self._next_s = self._start_s + self.EVERY_S

    def __call__(self, done: int, most: int) -> None:
        """Tell how many of at most ``most`` candidates are simulated."""
        if (now_s := monotonic()) < self._next_s:
            return
        took_s = now_s - self._start_s
        complain(f"simulated: {done} in {took_s:.0f} s, at most {most - done} to go")
        self._next_s = now_s + self.EVERY_S
