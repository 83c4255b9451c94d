"""``fold3d plan``: print the plan of a schedule."""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from megatron.fold3d.commands.console import OK, write
from megatron.fold3d.commands.cost_flags import add_cost_flags, given_costs
from megatron.fold3d.commands.plan_source import sizes
from megatron.fold3d.commands.schedule_options import (
    add_schedule_options,
    asks_to_choose,
    check_named,
    compute_plan,
    where_it_starts,
)
from megatron.fold3d.config.schedule_flags import choice_of
from megatron.fold3d.plan.compile import Features, lower

EXAMPLE = "fold3d plan --schedule aiao --pp 2 --segments 2 --microbatches 3"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of this command."""
    add_schedule_options(parser, required=True)
    parser.add_argument(
        "--compute-only", action="store_true", help="without transfers and gradient sync"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--format", choices=("text", "csv"), default="text")
    form.add_argument("--json", action="store_true", help="sizes, peak activations and programs")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write here, not to stdout")
    add_cost_flags(parser)  # for what is `auto`


def run(args: Namespace) -> int:
    """Print the plan; returns the exit code."""
    args = check_named(args)
    plan = compute_plan(args)
    if asks_to_choose(args):
        from megatron.fold3d.commands.cost_options import costs_of
        from megatron.fold3d.commands.order_options import chosen_order

        _, plan = chosen_order(args, costs_of(args, plan))
    elif given := given_costs(args):
        raise ValueError(
            f"{given} without an auto: only ahead=auto and wgrad=gaps read costs "
            "here; drop it, or give one of them"
        )
    if not args.compute_only:
        features = Features(
            shards_grads=args.shard_segments == "gradients",
            grad_sync=where_it_starts(args, None, plan.num_segments),
        )
        plan = lower(plan, choice_of(args, plan.num_segments), features)
    if args.json:
        programs = list(plan.programs_as_words())
        text = json.dumps({"schedule": args.schedule, **sizes(plan), "programs": programs}) + "\n"
    else:
        text = plan.to_csv() if args.format == "csv" else plan.to_text()
    if args.output:
        args.output.write_text(text, encoding="utf-8")
    else:
        write(text)
    return OK
