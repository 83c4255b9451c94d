"""Output of commands: results on stdout, so that they can be piped, everything else on stderr."""

import os
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import chain, product
from string import ascii_uppercase
from time import monotonic
from typing import Self

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


def lettered(names: Iterable[str]) -> list[str]:
    """Return names with a letter before each, which tells apart those that are equal."""
    letters = chain(ascii_uppercase, map("".join, product(ascii_uppercase, repeat=2)))
    return [f"{letter} {name}" for letter, name in zip(letters, names, strict=False)]


def complain(message: str) -> None:
    """Write a line to stderr."""
    print(message, file=sys.stderr, flush=True)  # noqa: T201


def suggestion(words: Iterable[str], known: Iterable[str]) -> str:
    """Return ``; did you mean ...?`` for words that are nearly one of those known, or nothing.

    A word that begins one of them stands for it: ``--seg`` for ``--segments``.
    """
    choices = sorted(known)
    near = [match for word in words for match in _nearest(word.partition("=")[0], choices)]
    return f"; did you mean {', '.join(near)}?" if near else ""


def _nearest(word: str, choices: Sequence[str]) -> Sequence[str]:
    if close := get_close_matches(word, choices, 1, 0.75):
        return close
    begun = [choice for choice in choices if len(word) > 3 and choice.startswith(word)]
    return begun if len(begun) <= 3 else ()


class Progress:
    """A counter on stderr for what takes longer than two seconds.

    On a terminal it rewrites one line and leaves none; into a file it adds a line now and then, and
    a last one.

    Args:
        what: the word for what is counted, a participle.
        rest: why the count ends before what there is at most.
    """

    DELAY_S, TERMINAL_S, FILE_S = 2.0, 0.2, 10.0

    def __init__(self, what: str, rest: str) -> None:
        self._what, self._rest = what, rest
        self._done = 0
        self._rewrites = sys.stderr is not None and sys.stderr.isatty()
        self._start_s = monotonic()
        self._next_s = self._start_s + self.DELAY_S
        self._shown = False

    def __call__(self, done: int, most: int) -> None:
        """Show how many are done of those that there are now, and when these will be."""
        now_s, self._done = monotonic(), done
        if now_s < self._next_s:
            return
        left_s = (now_s - self._start_s) / max(1, done) * (most - done)
        line = f"{self._what}: {done} of about {most}, about {left_s:.0f} s left"
        self._next_s = now_s + (self.TERMINAL_S if self._rewrites else self.FILE_S)
        self._shown = True
        show = self._rewrite if self._rewrites else complain
        show(line)

    def _rewrite(self, line: str) -> None:
        print(f"\r{line}\033[K", end="", file=sys.stderr, flush=True)  # noqa: T201

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._shown and self._rewrites:
            self._rewrite("")
        elif self._shown and kind is None:
            complain(f"{self._what}: {self._done}, done; {self._rest}")
