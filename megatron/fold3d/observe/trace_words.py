"""The words of traces of version 1, which named a wait after what waited, in those of version 2."""

import re
from typing import Any

from megatron.fold3d.observe.messages import message_to
from megatron.fold3d.plan.ir import Action

_OLD = re.compile(r"(\d+)(REDUCE_GRAD|WAIT_GRAD|GATHER_PARAM|WAIT_PARAM)(_B)?(?:\.(\d+))?")
_WAITS = {"WAIT_GRAD": "REDUCE_GRAD", "WAIT_PARAM": "GATHER_PARAM"}


def from_version_1(found: dict[str, Any]) -> None:
    """Rename what a file of version 1 holds, in place.

    Sums become all-reduces: version 1 did not tell them from reduce-scatters, and no time of a
    trace depends on it.
    """
    found["plan"] = _OLD.sub(_in_plan, found["plan"])
    for row in found["iterations"]:
        row["events"] = [
            (_in_event(name, kind), start_s, end_s, kind)
            for name, start_s, end_s, kind in row["events"]
        ]


def _in_plan(match: re.Match[str]) -> str:
    stage, word, again, end = match.groups(default="")
    if word == "WAIT_PARAM":  # what reads parameters waits for them
        return ""
    new = {"REDUCE_GRAD": "ALL_REDUCE", "WAIT_GRAD": "STEP", "GATHER_PARAM": "ALL_GATHER"}[word]
    return f"{stage}{new}{again}{end and ':'}{end}"


def _in_event(name: str, kind: str) -> str:
    if (match := _OLD.fullmatch(name)) is not None:
        stage, word, again, _ = match.groups(default="")
        launched = f"{stage}{_WAITS.get(word, word)}{again}"
        return "wait " * (kind == "wait") + _OLD.sub(_in_plan, launched)
    reader = name.removeprefix("wait ")
    return name if reader == name else f"wait {message_to(Action.from_str(reader))}"
