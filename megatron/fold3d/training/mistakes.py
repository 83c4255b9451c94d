"""How a user's mistake ends a run: one message on each node, and exit code 2."""

import json
import linecache
import os
import re
import sys
import time
import traceback
from pathlib import Path

from megatron.fold3d.config.spelling import flag_of

PATIENCE_S = 10.0
# What Megatron, its tokenizers and our patches raise about flags, files and packages.
MISTAKES = (ValueError, AssertionError, RuntimeError, OSError, ImportError)


def refuse(error: Exception) -> int:
    """Print an error on one rank of each node; returns the exit code.

    The launcher ends all ranks when the printing rank ends. A rank that still runs after that has
    found an error that the printing rank has not, and prints it: Megatron checks some options only
    on the last rank.
    """
    if not speaks():
        time.sleep(PATIENCE_S)
    lines = [
        line if line.startswith(" ") else f"{script()}: error: {line}"  # rows of a plan's grid
        for line in _reason(error).splitlines()
    ]
    sys.stderr.write("\n".join((*lines, "")))
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # torchrun ends with a traceback of its own, and below it with what is in this file.
        report = {"message": "\n".join(lines), "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(file).write_text(json.dumps({"message": report}), encoding="utf-8")
    return 2


def speaks() -> bool:
    """Tell whether this rank is the one of its node that prints."""
    return os.environ.get("LOCAL_RANK", "0") == "0"  # torchrun's: there is no group yet


def script() -> str:
    """Return the name of the script that was started."""
    return Path(sys.argv[0]).name


def _reason(error: Exception) -> str:
    """Return the error's message and notes; where an assertion has no message, the assertion."""
    if str(error):
        return "\n".join((str(error), *getattr(error, "__notes__", ())))
    frame = traceback.extract_tb(error.__traceback__)[-1]
    lines = linecache.getlines(frame.filename)[(frame.lineno or 1) - 1 : frame.end_lineno]
    demand = " ".join("".join(lines).split()).removeprefix("assert ")
    flags = re.sub(r"\bargs\.(\w+)", lambda found: flag_of(found[1]), demand)
    return f"Megatron demands: {flags}"
