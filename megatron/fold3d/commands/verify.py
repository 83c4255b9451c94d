"""``fold3d verify``: prove that a plan can run."""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from megatron.fold3d.commands.console import OK, REJECTED, complain, counted, write
from megatron.fold3d.commands.plan_sizes import in_words, sizes
from megatron.fold3d.plan.device_queues import CONNECTIONS
from megatron.fold3d.plan.files import parse_plan, read_plan
from megatron.fold3d.plan.ir import PlanError
from megatron.fold3d.plan.verify import verify

EXAMPLE = "fold3d verify --plan-file my-plan.txt"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument(
        "--plan-file",
        required=True,
        type=Path,
        help="text, CSV or JSON as `fold3d plan` writes it, or the CSV of a schedule of "
        "torch.distributed.pipelining; - is stdin",
    )
    parser.add_argument(
        "--cuda-connections",
        type=int,
        choices=CONNECTIONS,
        metavar="N",
        help="also play the plan on GPUs with CUDA_DEVICE_MAX_CONNECTIONS=N: 1, 8 or 32",
    )
    parser.add_argument(
        "--tensor-parallel",
        action="store_true",
        help="with --cuda-connections: collectives inside computations take part",
    )
    parser.add_argument("--json", action="store_true", help="the verdict as one JSON object")


def run(args: Namespace) -> int:
    """Print the verdict; returns the exit code."""
    if args.tensor_parallel and args.cuda_connections is None:
        raise ValueError(
            "--tensor-parallel without --cuda-connections: only hardware queues make a difference "
            "to it; give --cuda-connections 1"
        )
    if args.plan_file == Path("-"):
        with open(0, "rb", closefd=False) as stdin:  # sys.stdin is None where a shell closed it
            plan = parse_plan(stdin.read())
    else:
        plan = read_plan(args.plan_file)
    try:
        verify(plan)
        if args.cuda_connections is not None:
            from megatron.fold3d.predict.simulator.device_run import verify_on_device

            verify_on_device(plan, args.cuda_connections, tensor_parallel=args.tensor_parallel)
    except PlanError as error:
        if args.json:
            write(json.dumps({"ok": False, "error": str(error)}) + "\n")
        complain(str(error))
        return REJECTED
    summary = sizes(plan)
    if args.json:
        write(json.dumps({"ok": True, **summary}) + "\n")
    else:
        plan_sizes = (plan.num_ranks, plan.num_segments, plan.num_microbatches)
        peaks = " ".join(map(str, summary["peak_activations"]))
        write(
            f"cannot deadlock: {in_words(*plan_sizes)}, {counted(summary['actions'], 'actions')}, "
            f"peak activations per rank: {peaks}\n"
        )
    return OK
