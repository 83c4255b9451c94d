"""Faults of synchronization, each a small change of our source that a test must notice.

`mutations.diff` has the name of each, the place that it changes, what reaches it, a case of `cases`
or a program of `small_programs`, and a diff. The place is a function below
``megatron.fold3d.runtime`` or a file of ``csrc``; the lines of a hunk occur once in its source.
"""

import functools
import inspect
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any, Literal, cast

from tests.gpu_path import other_scheduler


@dataclass(frozen=True, slots=True)
class Mutation:
    """One fault.

    Attributes:
        name: what goes wrong.
        place: ``module:function`` or ``module:Class.method``, or a file of ``csrc``.
        hunks: of the diff, each a few lines with their signs.
        reached_in: the case or the program that reaches it.
        late: which streams must be late for it to show.
        num_queues: hardware queues of the device.
    """

    name: str
    place: str
    hunks: tuple[str, ...]
    reached_in: str
    late: Literal["compute", "others"] = "others"
    num_queues: int = 64

    def __str__(self) -> str:
        return self.name

    @property
    def is_cpp(self) -> bool:
        return self.place.endswith(".cpp")

    def change(self, source: str) -> str:
        """Return the source with the fault in it."""
        for hunk in self.hunks:
            before, after = (
                "".join(
                    line[1:] for line in hunk.splitlines(keepends=True) if line[0] in f" {sign}"
                )
                for sign in "-+"
            )
            assert source.count(before) == 1, f"{self.name}: {self.place} has changed"
            source = source.replace(before, after)
        return source


def _read(text: str) -> Mutation:
    name, place, body = text.split("\n", 2)
    said = dict(re.findall(r"^(in|late|queues): (.*)\n", body, re.M))
    diff = re.sub(r"^(in|late|queues): .*\n", "", body, flags=re.M).rstrip("\n") + "\n"
    return Mutation(
        name,
        place,
        tuple(re.split(r"^@@\n", diff, flags=re.M)),
        said["in"],
        cast(Literal["compute", "others"], said.get("late", "others")),
        int(said.get("queues", 64)),
    )


_TEXT = Path(__file__).with_suffix(".diff").read_text()
MUTATIONS = tuple(map(_read, re.split(r"^## ", _TEXT, flags=re.M)[1:]))


def build(mutation: Mutation) -> None:
    """Compile what the fault changes, if that is C++, so that no rank has to."""
    if mutation.is_cpp:
        other_scheduler.build(mutation.place, mutation.change)


@contextmanager
def mutate(mutation: Mutation) -> Iterator[None]:
    """Change the source of one function, or of C++, for as long as the context lasts."""
    if mutation.is_cpp:
        other_scheduler.load(other_scheduler.build(mutation.place, mutation.change))
        yield
        return
    module, _, path = mutation.place.partition(":")
    home = import_module(f"megatron.fold3d.runtime.{module}")
    function = _function(functools.reduce(getattr, path.split("."), home))
    source = textwrap.dedent(inspect.getsource(function))
    source = source[source.index("def ") :]  # without its decorators
    names = dict(function.__globals__)
    exec(mutation.change(source), names)
    code, function.__code__ = function.__code__, names[function.__name__].__code__
    try:
        yield
    finally:
        function.__code__ = code


def _function(found: Any) -> FunctionType:
    function = inspect.unwrap(getattr(found, "fget", None) or found)
    assert isinstance(function, FunctionType)
    return function
