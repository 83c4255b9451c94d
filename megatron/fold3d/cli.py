"""The `fold3d` command: finds the sub-command, runs it, and turns mistakes into messages.

Exit codes: 0 is yes, 1 is no (a plan that cannot run), 2 is a mistake in the command line or a
file that cannot be read. A user's mistake ends in one message on stderr and never in a traceback.
Only the module of the requested sub-command is loaded, so that `fold3d verify` does not load the
simulator.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, NoReturn

from megatron.fold3d.commands.console import OK, suggestion, write

USAGE = 2
INTERRUPTED = 130  # what a shell makes of Ctrl-C

_COMMANDS = {
    "plan": "print the plan of a schedule, one line per rank",
    "verify": "prove that a plan can run, or show the action that stops it",
    "simulate": "predict how long a plan takes and where its time goes",
    "search": "choose schedule, sizes and segments for a model on a cluster",
    "import": "turn a Hugging Face configuration into Megatron's flags",
    "trace": "show where the time of a traced run went",
    "compare": "compare training runs: speed, losses, where the time went",
    "doctor": "look at the installation, and say what to fix",
}
_FILES = {"import": "import_config"}  # a keyword of Python cannot be a module's name
_VALUES: dict[Any, str] = {Path: "FILE", int: "N"}  # what a help calls the value of an option


class _Parser(argparse.ArgumentParser):
    """Its errors name the options that unknown ones of its ``words`` are nearly, or begin."""

    words: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        known = self._option_string_actions
        unknown = [w for w in self.words if w.startswith("--") and w.partition("=")[0] not in known]
        super().error(message + (_hint(unknown, self) if unknown else ""))


def _hint(words: Sequence[str], command: argparse.ArgumentParser) -> str:
    """Return what options that a command does not know may be: misspelt, or a training's flags."""
    from megatron.fold3d.commands.training_words import flags_of_trainings

    flags = flags_of_trainings(words)
    if flags and command.get_default("words") is None:
        return f"; {flags[0]} is a training's flag: fold3d plan, simulate and search take it"
    misspelt = [word for word in words if word not in flags]
    return suggestion(misspelt, command._option_string_actions)


class _Help(argparse.RawDescriptionHelpFormatter):
    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return _VALUES.get(action.type) or super()._get_default_metavar_for_optional(action)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; returns the exit code.

    Raises:
        SystemExit: from argparse, for ``--help`` (0) and for unknown options (2).
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(
        prog="fold3d",
        description="Pipeline schedules as plans: write, check, time, choose them.",
        epilog="exit code: 0 yes, 1 no (a plan that cannot run, say), 2 a mistake in the words",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    if words == ["--version"]:
        write(f"fold3d {_version()}\n")
        return OK
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    asked = parser
    if words and words[0] not in _COMMANDS and not words[0].startswith("-"):
        near = suggestion(words[:1], _COMMANDS) or f"; it is one of {', '.join(_COMMANDS)}"
        parser.error(f"no command {words[0]!r}{near}")
    try:
        for name, summary in _COMMANDS.items():
            if [name] == words[:1]:
                asked = _add_command(commands, name, summary)
            else:
                commands.add_parser(name, help=summary)
        asked.words = words
        behind: list[str] = []
        if asked.get_default("words") is not None and "--" in words:
            at = words.index("--")
            words, behind = words[:at], words[at + 1 :]
        args, unknown = parser.parse_known_args(words)
        if hasattr(args, "words"):  # a training's flags
            args.words = unknown, behind
        elif unknown:  # with the usage of the command that was asked for
            asked.error(f"unrecognized arguments: {' '.join(unknown)}")
        return int(args.run(args))
    except ValueError as error:  # PlanError is one
        message = str(error)
    except OSError as error:
        message = ": ".join(filter(None, (error.filename, error.strerror))) or str(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    print(f"{asked.prog}: {message}", file=sys.stderr)
    return USAGE


def _version() -> str:
    try:
        return metadata.version("fold3d")
    except metadata.PackageNotFoundError:
        return f"not installed, imported from {__file__}"


def _add_command(commands: Any, name: str, summary: str) -> _Parser:
    """Load the module of a sub-command; returns the parser of its options."""
    module = import_module(f"megatron.fold3d.commands.{_FILES.get(name, name)}")
    command: _Parser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=f"example:\n  {module.EXAMPLE}",
        formatter_class=_Help,
        allow_abbrev=False,  # as in training: an option that is added could mean something else
    )
    command.set_defaults(run=module.run)
    module.add_arguments(command)
    return command


if __name__ == "__main__":
    raise SystemExit(main())
