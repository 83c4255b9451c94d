"""The word that ``--schedule`` takes: an order of computation, and further choices.

    word   =  order { ":" key "=" value [ "@" segments ] }
    order  =  "stock" | "auto" | a name of `plan.schedules.SCHEDULES` | "plan=" file

``aiao:step=next:wgrad=behind@1,3`` is the order ``aiao``; optimizer steps reach into the next
iteration, and weight gradients of segments 1 and 3 are computed after the segment's backwards.
Segments count from 0; ``4-7`` is 4 to 7, and a part without segments is for all segments. A shell
takes all characters literally. Training, logs, `fold3d` and pages use this spelling.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from megatron.fold3d.plan.schedules import SCHEDULES

Segments = tuple[int, ...]

AUTO = "auto"
STOCK = "stock"
PLAN = "plan"
ORDERS = (STOCK, AUTO, *SCHEDULES)

# The values of each key, the default first; a text in <> is a number.
VALUES: Mapping[str, tuple[str, ...]] = {
    "optimizer": ("sharded", "replicated", AUTO),
    "step": ("end", "next"),
    "wgrad": ("backward", "behind", "last", "gaps"),
    "recompute": ("late", "early"),
    "ahead": ("<n>", AUTO),
    "held": ("<n>",),
    "group": ("<n>",),
    "share": ("<x>",),
    "slices": ("off", "on"),
    "slice-bytes": ("<n>",),
    "pairs": ("off", "on"),
}
_OF_SEGMENTS = frozenset({("optimizer", "replicated"), ("wgrad", "behind"), ("wgrad", "last")}) | {
    ("recompute", "early")
}
READ: Mapping[str, Callable[[str], Any]] = {"<n>": int, "<x>": float, "off": "on".__eq__}
_SEGMENTS = re.compile(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*")
_NUMBER = {"<n>": re.compile(r"-?\d{1,18}"), "<x>": re.compile(r"-?\d*\.?\d+|-?\d+\.")}


@dataclass(frozen=True, slots=True)
class Part:
    """A key of the word with its value.

    Attributes:
        segments: the segments that have the value, in ascending order; None is all.
    """

    key: str
    value: str
    segments: Segments | None = None

    def __str__(self) -> str:
        """Return ``key=value@segments``."""
        at = "" if self.segments is None else f"@{spelled(self.segments)}"
        return f"{self.key}={self.value}{at}"


@dataclass(frozen=True, slots=True)
class Word:
    """The parsed value of ``--schedule``; `parse` and `str` are inverse.

    Attributes:
        order: a name of `ORDERS`, or ``plan=`` and a file.
        parts: the parts in the order of `VALUES`, without duplicates.
    """

    order: str
    parts: tuple[Part, ...] = ()

    def __str__(self) -> str:
        """Return the word as ``--schedule`` takes it."""
        return ":".join([self.order, *map(str, self.parts)])

    @classmethod
    def parse(cls, text: str) -> "Word":
        """Read a word.

        Raises:
            ValueError: the text is not a word; the message is one line with found, rule and fix.
        """
        order, *words = text.split(":")
        kind, _, file = order.partition("=")
        if order not in ORDERS and not (kind == PLAN and file):
            raise ValueError(f"{order!r} is no order; give {', '.join(ORDERS)}, or plan=FILE")
        parts = sorted(map(_part, words), key=_place)
        for key, given in groupby(parts, lambda part: part.key):
            _check_apart(key, [*given])
        return cls(order, tuple(parts))

    def written_out(self, num_segments: int) -> "Word":
        """Return the word in which parts for all segments name every segment."""
        every = tuple(range(num_segments))
        parts = (
            replace(part, segments=every)
            if part.segments is None and (part.key, part.value) in _OF_SEGMENTS
            else part
            for part in self.parts
        )
        return replace(self, parts=tuple(parts))

    def value(self, key: str) -> str | None:
        """Return the value of a key that is given once; None if it is not given."""
        return next((part.value for part in self.parts if part.key == key), None)

    def number(self, key: str) -> Any:
        """Return the number of a key; None if the key is not given, or is ``auto``."""
        value = self.value(key)
        return None if value in (None, AUTO) else READ[VALUES[key][0]](value)


def spelled(segments: Sequence[int]) -> str:
    """Return ascending segments as text of a word: ``1,3,6-8``."""
    runs: list[list[int]] = []
    for segment in segments:
        if runs and segment == runs[-1][-1] + 1:
            runs[-1].append(segment)
        else:
            runs.append([segment])
    return ",".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs
    )


def _place(part: Part) -> tuple[int, int]:
    """Return the key by which parts are sorted in a word: by key, then by value."""
    values = VALUES[part.key]
    value = values.index(part.value) if part.value in values else 0
    return [*VALUES].index(part.key), value


def _part(word: str) -> Part:
    key, _, rest = word.partition("=")
    value, at, segments = rest.partition("@")
    if key not in VALUES:
        raise ValueError(f"{word!r}: there is no key {key!r}; give one of {', '.join(VALUES)}")
    known = VALUES[key]
    if not (value in known and value not in _NUMBER) and not any(
        pattern.fullmatch(value) for kind, pattern in _NUMBER.items() if kind in known
    ):
        choices = " or ".join("a number" if one in _NUMBER else one for one in known)
        raise ValueError(f"{word!r}: {key} has no value {value!r}; give {choices}")
    if not at:
        return Part(key, value)
    if (key, value) not in _OF_SEGMENTS:
        raise ValueError(f"{word!r}: {key}={value} is for all segments; drop @{segments}")
    return Part(key, value, _read_segments(word, segments))


def _read_segments(word: str, text: str) -> Segments:
    if not _SEGMENTS.fullmatch(text):
        raise ValueError(f"{word!r}: {text!r} are no segments; give them as 1,3,6-8")
    found: list[int] = []
    for run in text.split(","):
        first, _, last = run.partition("-")
        found += range(int(first), int(last or first) + 1)
    if len({*found}) < len(found) or not found:
        raise ValueError(f"{word!r}: {text!r} names a segment twice or none; give each once")
    return tuple(sorted(found))


def _check_apart(key: str, parts: Sequence[Part]) -> None:
    """Refuse two values of a key for one segment."""
    named = [part.segments for part in parts if part.segments is not None]
    every = [segment for segments in named for segment in segments]
    if len(parts) > max(1, len(named)) or len({*every}) < len(every):
        found = " and ".join(map(str, parts))
        raise ValueError(f"{found}: a segment has one value of {key}; drop one of the two")
