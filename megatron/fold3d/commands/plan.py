"""``fold3d plan``: print the plan of a training."""

import json
from argparse import ArgumentParser, Namespace

from megatron.fold3d.commands.console import OK, write
from megatron.fold3d.commands.cost_sources import add_number_options, in_numbers
from megatron.fold3d.commands.job import config_of, run_of
from megatron.fold3d.commands.megatron_flags import add_training_flags, given_training
from megatron.fold3d.commands.plan_sizes import sizes
from megatron.fold3d.plan.compile import lower
from megatron.fold3d.plan.files import to_csv
from megatron.fold3d.plan.ops import COMPUTE_OPS, GATHER_OPS, HOST_OPS

EXAMPLE = "fold3d plan --schedule aiao --pp 2 --segments 2 --microbatches 3"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument(
        "--compute-only", action="store_true", help="without transfers and gradient sync"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--format", choices=("text", "csv"), default="text")
    form.add_argument("--json", action="store_true", help="sizes, peak activations and programs")
    add_number_options(parser)  # for what is `auto`
    add_training_flags(parser)


def run(args: Namespace) -> int:
    """Print the plan; returns the exit code."""
    said = given_training(args)
    config = config_of(said)
    its = run_of(said.args, config, in_numbers(args))
    is_open = its.auto_ahead or its.candidate.choice.fills_gaps
    if not is_open and (given := [n for n in ("seconds", "costs") if getattr(args, n)]):
        raise ValueError(
            f"--{given[0]} without an auto: only ahead=auto and wgrad=gaps read costs here; drop "
            "it, or give one of them"
        )
    its = its.settled()
    job = its.judge(its.candidate.choice).job
    plan = lower(job, transfers=not args.compute_only)
    if args.compute_only:
        sharded = job.shards != "off"
        plan = plan.select(COMPUTE_OPS | HOST_OPS | (GATHER_OPS if sharded else frozenset()))
    if args.json:
        programs = list(plan.to_rows())
        found = {"schedule": config.choice.order, **sizes(plan), "programs": programs}
        write(json.dumps(found) + "\n")
    else:
        write(to_csv(plan) if args.format == "csv" else plan.to_text())
    return OK
