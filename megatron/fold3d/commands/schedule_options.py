"""The options that name a schedule and its sizes, and the compute plan that they stand for."""

from argparse import ArgumentParser, Namespace

from megatron.fold3d.config.retired_flags import add_retired_flags
from megatron.fold3d.config.schedule_flags import add_schedule_word, written_out
from megatron.fold3d.config.weight_grad_flags import weight_grad_part
from megatron.fold3d.plan.choice import stock_schedule
from megatron.fold3d.plan.compile import GradSync
from megatron.fold3d.plan.ir import Plan, PlanError, stages_of
from megatron.fold3d.plan.passes.pairs import check_pairs, in_pairs, num_pairs
from megatron.fold3d.plan.passes.recompute import recompute_early
from megatron.fold3d.plan.passes.shard_params import shard_params
from megatron.fold3d.plan.passes.weight_grads import delay_weight_grads
from megatron.fold3d.plan.schedule_word import AUTO, STOCK
from megatron.fold3d.plan.schedules import SPLIT_SCHEDULES, build, check_forwards_ahead

_OURS = ("shard_segments", "recompute_layers", "preemptive_comm")  # options for our schedules


def add_schedule_options(parser: ArgumentParser, *, required: bool) -> None:
    """Add ``--schedule`` and the sizes of a plan; if not ``required``, flags may say them."""
    add_schedule_word(
        parser,
        "the word that training takes: an order and its choices, such as aiao:step=next",
        required=required,
    )
    add_retired_flags(parser)
    parser.add_argument("--pp", required=required, type=int, metavar="N", help="pipeline ranks")
    parser.add_argument(
        "--segments", type=int, metavar="N", help="model chunks per rank (default: 1)"
    )
    parser.add_argument("--microbatches", required=required, type=int, metavar="N")
    parser.add_argument(
        "--shard-segments",
        choices=("weights", "gradients"),
        help="weights: free a stage's parameters behind its last use and gather them again before "
        "its backwards; gradients: also keep only a shard of its reduced gradients",
    )


def check_named(args: Namespace) -> Namespace:
    """Return arguments with the numbers of segments, and the order that stock's schedule has.

    Raises:
        ValueError: the word names an order, or a choice, that the command has not.
    """
    segments = 1 if args.segments is None else args.segments
    is_stock = args.schedule == STOCK
    if is_stock and (own := [key for key in args.schedule_keys if key != "group"]):
        raise ValueError(
            f"{own[0]}= with --schedule stock: only a schedule of ours has it; drop it, or name one"
        )
    for name in _OURS if is_stock else ():
        if value := getattr(args, name, None):
            flag = "--" + name.replace("_", "-")
            found = flag if value is True else f"{flag} {spelled(value)}"
            raise ValueError(
                f"{found} with --schedule stock: only a schedule of ours has it; drop one"
            )
    named = stock_schedule(segments) if is_stock else args.schedule
    args = Namespace(**vars(args) | {"schedule": named, "is_stock": is_stock})
    if "share" in args.schedule_keys and args.backward_share is None:
        raise ValueError("share= without step=next: it is a share of what that defers; add it")
    args = written_out(args, segments)
    for name in ("delay_weight_grads", "recompute_early", "replicate_optimizer"):
        for segment in getattr(args, name) if isinstance(getattr(args, name), tuple) else ():
            if segment >= segments and args.plan_file is None:
                raise ValueError(
                    f"there is no segment {segment} in --schedule {args.schedule}, a rank holds "
                    f"{segments}; give some of 0 to {segments - 1}"
                )
    return args


def asks_to_choose(args: Namespace) -> bool:
    """Whether an option leaves the order of computation to its costs."""
    return AUTO in (args.forwards_ahead, args.delay_weight_grads)


def compute_plan(args: Namespace, forwards_ahead: int | None = None) -> Plan:
    """Return the plan of ``args.schedule``, without transfers and gradient sync.

    Args:
        args: the command's arguments.
        forwards_ahead: replaces ``ahead=auto``; all weight gradients then stay in their backwards.

    Raises:
        PlanError: no such plan can run, or a part of the word has no reader.
    """
    group = args.schedule_group
    if group is not None and args.schedule != "interleaved":
        raise PlanError(
            f"group={group} with --schedule {args.schedule}: only interleaved has groups; drop it"
        )
    if args.forwards_ahead == AUTO:
        check_forwards_ahead("auto", args.schedule)
    delayed = args.delay_weight_grads
    if delayed and args.schedule in SPLIT_SCHEDULES:
        raise PlanError(
            f"{weight_grad_part(args)} with --schedule {args.schedule}: it has all weight "
            "gradients apart already; drop one of the two"
        )
    if args.most_activations is not None and (delayed != AUTO or args.most_activations < 1):
        raise PlanError(
            f"held={args.most_activations}: it limits what wgrad=gaps holds, and a rank holds at "
            "least one; give both, or drop it"
        )
    paired = bool(args.overlap_tensor_parallel)
    if paired:
        _check_paired(args)
    plan = build(
        args.schedule,
        num_ranks=args.pp,
        num_segments=1 if args.segments is None else args.segments,
        num_microbatches=num_pairs(args.microbatches) if paired else args.microbatches,
        group_size=group,
        forwards_ahead=forwards_ahead if args.forwards_ahead == AUTO else args.forwards_ahead,
    )
    if paired:
        plan = in_pairs(plan, args.microbatches)
        check_pairs(plan)
    plan = delay_weight_grads(plan, () if delayed == AUTO else delayed)
    early = stages_of(args.recompute_early, plan.num_ranks)
    plan = recompute_early(plan, early, in_pairs=paired)
    return plan if args.shard_segments is None else shard_params(plan)


def where_it_starts(args: Namespace, grad_sync: str | None, num_segments: int) -> GradSync:
    """Return where DP.sync starts in the plan; stock's starts on all ranks of a segment at once.

    Without virtual stages its hooks start it in the last backward, if at all.
    """
    if grad_sync == "serial" or (args.is_stock and num_segments == 1):
        return "serial"
    return "aligned" if args.is_stock else "overlap"


def spelled(value: object) -> str:
    """Return an option's value as the command line has it."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _check_paired(args: Namespace) -> None:
    """Refuse what training refuses beside pairs, as far as it concerns the plan."""
    if args.schedule in SPLIT_SCHEDULES:
        raise PlanError(
            f"pairs=on with --schedule {args.schedule}: weight gradients are computed apart for "
            "one micro-batch at a time; give --schedule 1f1b"
        )
    for key, given in (("wgrad", args.delay_weight_grads), ("group", args.schedule_group)):
        if given:
            raise PlanError(
                f"pairs=on with {key}=: never shown to train what stock does; drop one of the two"
            )
