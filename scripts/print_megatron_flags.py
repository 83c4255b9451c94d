"""Print the flags of the installed Megatron into the file that commands read without Megatron.

    .venv/bin/python scripts/print_megatron_flags.py

A test compares the file with what this prints.
"""

import json
from argparse import ArgumentParser, BooleanOptionalAction
from collections.abc import Iterator

from fold3d_patches.cpu.compiler import uncompiled
from megatron.fold3d.commands.training_words import KINDS, MEGATRON_FLAGS

with uncompiled():
    from megatron.training.arguments import add_megatron_arguments


def printed() -> str:
    """Return the file: the attribute of each flag, what it takes, how many, the default."""
    rows = (f"{json.dumps(flag)}: {json.dumps(row)}" for flag, *row in sorted(_rows()))
    return "{\n" + ",\n".join(rows) + "\n}\n"


def _rows() -> Iterator[tuple[object, ...]]:
    for action in add_megatron_arguments(ArgumentParser(add_help=False))._actions:
        kind: str | list[object] = "true" if action.const else "false"
        if action.nargs != 0:
            name = getattr(action.type, "__name__", "str")
            kind = name if name in KINDS else "str"
        if action.choices and action.dest != "exit_signal":  # signals are the machine's
            kind = [getattr(choice, "name", choice) for choice in action.choices]
        default = getattr(action.default, "name", action.default)  # of an enumeration
        for flag in action.option_strings:
            if isinstance(action, BooleanOptionalAction):
                kind = "false" if flag.startswith("--no-") else "true"
            yield flag, action.dest, kind, action.nargs or None, default


if __name__ == "__main__":
    MEGATRON_FLAGS.write_text(printed(), encoding="utf-8")
