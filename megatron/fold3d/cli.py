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
    for name, summary in _COMMANDS.items():
        if [name] != words[:1]:
            commands.add_parser(name, help=summary)
            continue
        module = import_module(f"megatron.fold3d.commands.{name}")
        command = commands.add_parser(
            name,
            help=summary,
            description=module.DESCRIPTION,
            epilog=module.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=module.run, prog=command.prog)
        module.add_arguments(command)
    args = parser.parse_args(words)
    try:
        return int(args.run(args))
    except ValueError as error:  # PlanError is one
        message = str(error)
    except OSError as error:
        message = ": ".join(filter(None, (error.filename, error.strerror)))
    except KeyboardInterrupt:
        return INTERRUPTED
    print(f"{args.prog}: {message}", file=sys.stderr)
    return USAGE
