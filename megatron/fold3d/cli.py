"""The `fold3d` command, one function per sub-command.

Exit codes: 0 is yes, 1 is no (a plan that cannot run), 2 is a mistake in the command line or a
file that cannot be read. A user's mistake ends in one message on stderr and never in a traceback.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from megatron.fold3d.plan.files import parse_plan, read_plan
from megatron.fold3d.plan.ir import Plan, PlanError
from megatron.fold3d.plan.lowering import lower
from megatron.fold3d.plan.schedules import SCHEDULES, LastSegment, build
from megatron.fold3d.plan.verify import peak_activations, verify

OK, REJECTED, USAGE = 0, 1, 2
INTERRUPTED = 130  # what a shell makes of Ctrl-C


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; returns the exit code.

    Raises:
        SystemExit: from argparse, for ``--help`` (0) and for unknown options (2).
    """
    parser = argparse.ArgumentParser(
        prog="fold3d", description="Pipeline schedules as plans: write them, check them."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_plan(commands)
    _add_verify(commands)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except PlanError as error:
        return _fail(args, str(error))
    except OSError as error:
        return _fail(args, ": ".join(filter(None, (error.filename, error.strerror))))
    except KeyboardInterrupt:
        return INTERRUPTED


def _add_plan(commands: Any) -> None:
    command = commands.add_parser(
        "plan",
        help="print the plan of a schedule, one line per rank",
        description="Print the plan of a schedule: one line per rank, its actions in order.\n"
        "2F0 is stage 2's forward of micro-batch 0, 2SEND_F0 sends its result to stage 3.\n"
        "Stage s is segment s // pp on rank s % pp.",
        epilog="examples:\n"
        "  fold3d plan --schedule aiao --pp 2 --segments 2 --microbatches 3 --compute-only\n"
        "  fold3d plan --schedule interleaved --pp 4 --segments 2 --microbatches 8 --group-size 6\n"
        "  fold3d plan --schedule 1f1b --pp 4 --microbatches 8 --format csv --output 1f1b.csv\n"
        "\n"
        "Train with what it wrote, as it is or edited: pretrain_gpt.py --plan-file FILE",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=_plan, prog=command.prog)
    command.add_argument("--schedule", required=True, choices=SCHEDULES)
    command.add_argument("--pp", required=True, type=int, metavar="N", help="pipeline ranks")
    command.add_argument(
        "--segments", type=int, default=1, metavar="N", help="model chunks per rank (default: 1)"
    )
    command.add_argument("--microbatches", required=True, type=int, metavar="N")
    command.add_argument(
        "--aiao-last-segment",
        choices=get_args(LastSegment),
        help="1f1b (default) holds fewer activations in the same time than the paper's afab",
    )
    command.add_argument(
        "--group-size",
        type=int,
        metavar="N",
        help="micro-batches per group of interleaved (default: as many as ranks)",
    )
    command.add_argument(
        "--compute-only", action="store_true", help="without transfers and gradient sync"
    )
    form = command.add_mutually_exclusive_group()
    form.add_argument("--format", choices=("text", "csv"), default="text")
    form.add_argument("--json", action="store_true", help="sizes, peak activations and programs")
    command.add_argument("--output", type=Path, metavar="FILE", help="write here, not to stdout")


def _plan(args: argparse.Namespace) -> int:
    _refuse_unread_options(args)
    plan = build(
        args.schedule,
        num_ranks=args.pp,
        num_segments=args.segments,
        num_microbatches=args.microbatches,
        last_segment=args.aiao_last_segment or "1f1b",
        group_size=args.group_size,
    )
    if not args.compute_only:
        plan = lower(plan)
    if args.json:
        programs = list(plan.programs_as_words())
        text = json.dumps({"schedule": args.schedule, **_summary(plan), "programs": programs})
        text += "\n"
    else:
        text = plan.to_csv() if args.format == "csv" else plan.to_text()
    if args.output:
        args.output.write_text(text, encoding="utf-8")
    else:
        _write(text)
    return OK


def _refuse_unread_options(args: argparse.Namespace) -> None:
    for flag, value, reader in (
        ("--aiao-last-segment", args.aiao_last_segment, "aiao"),
        ("--group-size", args.group_size, "interleaved"),
    ):
        if value is not None and args.schedule != reader:
            raise PlanError(
                f"{flag} {value} with --schedule {args.schedule}: only {reader} reads it; "
                f"drop it or give --schedule {reader}"
            )


def _add_verify(commands: Any) -> None:
    command = commands.add_parser(
        "verify",
        help="prove that a plan can run, or show the action that stops it",
        description="Prove that a plan runs every micro-batch once, in order, with matching\n"
        "sends and receives and without deadlock, or show the action that stops it.\n"
        "A plan without transfers is judged with those that training gives it.",
        epilog="examples:\n"
        "  fold3d verify --plan-file my-plan.txt\n"
        "  fold3d plan --schedule aiao --pp 4 --microbatches 8 | fold3d verify --plan-file -\n"
        "\n"
        "exit code: 0 the plan can run, 1 it cannot, 2 the file cannot be read",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=_verify, prog=command.prog)
    command.add_argument(
        "--plan-file",
        required=True,
        type=Path,
        metavar="FILE",
        help="text, CSV or JSON as `fold3d plan` writes it; - is stdin",
    )
    command.add_argument("--json", action="store_true", help="the verdict as one JSON object")


def _verify(args: argparse.Namespace) -> int:
    try:
        is_stdin = args.plan_file == Path("-")
        plan = parse_plan(_read_stdin()) if is_stdin else read_plan(args.plan_file)
        verify(plan)
    except PlanError as error:
        if args.json:
            _write(json.dumps({"ok": False, "error": str(error)}) + "\n")
        print(error, file=sys.stderr)
        return REJECTED
    summary = _summary(plan)
    if args.json:
        _write(json.dumps({"ok": True, **summary}) + "\n")
    else:
        peaks = " ".join(map(str, summary["peak_activations"]))
        _write(
            f"{summary['ranks']} ranks, {summary['segments']} segments, "
            f"{summary['microbatches']} micro-batches, {summary['actions']} actions, "
            f"peak activations per rank: {peaks}\n"
        )
    return OK


def _summary(plan: Plan) -> dict[str, Any]:
    return {
        "ranks": plan.num_ranks,
        "segments": plan.num_segments,
        "microbatches": plan.num_microbatches,
        "actions": sum(map(len, plan.programs)),
        "peak_activations": peak_activations(plan),
    }


def _read_stdin() -> bytes:
    with open(0, "rb", closefd=False) as stdin:  # sys.stdin is None where a shell closed it
        return stdin.read()


def _write(text: str) -> None:
    """Write to stdout; a reader that has seen enough (``| head``) is no error."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit


def _fail(args: argparse.Namespace, message: str) -> int:
    print(f"{args.prog}: {message}", file=sys.stderr)
    return USAGE
