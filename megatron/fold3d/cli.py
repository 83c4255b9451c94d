"""The `fold3d` command: finds the sub-command, runs it, and turns mistakes into messages.

Exit codes: 0 is yes, 1 is no (a plan that cannot run), 2 is a mistake in the command line or a
file that cannot be read. A user's mistake ends in one message on stderr and never in a traceback.
Only the module of the sub-command that was asked for is loaded: `fold3d plan` starts as fast as
if there were no simulator.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

USAGE = 2
INTERRUPTED = 130  # what a shell makes of Ctrl-C

_COMMANDS = {
    "plan": "print the plan of a schedule, one line per rank",
    "verify": "prove that a plan can run, or show the action that stops it",
    "simulate": "predict how long a plan takes and where its time goes",
    "search": "choose schedule, sizes and segments for a model on a cluster",
    "trace": "show where the time of a traced run went",
    "compare": "compare two training runs: speed, losses, where the time went",
    "doctor": "look at the installation, and say what to fix",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; returns the exit code.

    Raises:
        SystemExit: from argparse, for ``--help`` (0) and for unknown options (2).
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="fold3d", description="Pipeline schedules as plans: write, check, time, choose them."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    asked = parser
    try:
        for name, summary in _COMMANDS.items():
            if [name] == words[:1]:
                asked = _add_command(commands, name, summary)
            else:
                commands.add_parser(name, help=summary)
        args, unknown = parser.parse_known_args(words)
        if unknown:  # with the usage of the command that was asked for
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


def _add_command(commands: Any, name: str, summary: str) -> argparse.ArgumentParser:
    """Load the module of a sub-command; returns the parser of its options."""
    module = import_module(f"megatron.fold3d.commands.{name}")
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=module.DESCRIPTION,
        epilog=module.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=module.run)
    module.add_arguments(command)
    return command
