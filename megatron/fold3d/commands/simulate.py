"""``fold3d simulate``: predict how long a plan takes and where its time goes."""

import json
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from math import inf

from megatron.fold3d.commands import auto_options
from megatron.fold3d.commands.console import OK, REJECTED, complain, write
from megatron.fold3d.commands.cost_options import Source, add_cost_options, costs_of
from megatron.fold3d.commands.grad_sync_options import (
    check_behind,
    check_device_options,
    grad_sync_of,
    is_sliced,
    reduces_early,
    simulated_timeline,
    slice_shares,
)
from megatron.fold3d.commands.layer_options import with_chosen_layers
from megatron.fold3d.commands.order_options import chosen_order
from megatron.fold3d.commands.plan_source import plan_from
from megatron.fold3d.commands.recompute_options import with_recompute_counts
from megatron.fold3d.commands.replication_options import chosen_segments, replicated_source
from megatron.fold3d.commands.schedule_options import (
    asks_to_choose,
    check_named,
    compute_plan,
    spelled,
    where_it_starts,
)
from megatron.fold3d.commands.simulate_flags import add_simulate_flags
from megatron.fold3d.commands.simulate_report import (
    judge_memory,
    layout_lines,
    report_json,
    report_lines,
)
from megatron.fold3d.commands.training_job import with_training_flags
from megatron.fold3d.config.schedule_flags import choice_of
from megatron.fold3d.observe.report.draw import caption_of, draw
from megatron.fold3d.observe.timeline import Timeline
from megatron.fold3d.plan.compile import Features, lower
from megatron.fold3d.plan.ir import Op, Plan, PlanError
from megatron.fold3d.plan.ops import HOST_OPS, SUM_OPS, WEIGHT_OPS
from megatron.fold3d.plan.passes.recompute import recomputed
from megatron.fold3d.plan.schedule_word import AUTO, Part
from megatron.fold3d.plan.verify import verify
from megatron.fold3d.predict.simulator.lower_bound import bounds_of

EXAMPLE = "fold3d simulate --schedule aiao --pp 2 --segments 2 --microbatches 4"

_MOST_ITERATIONS = 1000
_OF_ORDERS = ("wgrad", "recompute", "ahead", "held", "group", "pairs")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of this command."""
    add_simulate_flags(parser)
    add_cost_options(parser)


def run(args: Namespace) -> int:
    """Print what is predicted; returns the exit code."""
    args = check_named(with_training_flags(args))
    if args.schedule == AUTO:
        write(auto_options.what_auto_would_try(args))
        return OK
    name, compute = _plan(args)
    try:
        if args.plan_file:  # a generated schedule is known to run
            verify(compute)
    except PlanError as error:
        complain(f"{name}: {error}")
        return REJECTED
    grad_sync = grad_sync_of(args)
    if compute.has(*SUM_OPS) and grad_sync is not None:
        raise ValueError(
            f"--grad-sync {grad_sync} or a share: the plan has its own DP.sync; drop it"
        )
    check_device_options(args, grad_sync)
    source = costs_of(args, compute)
    if any(map(recomputed, compute.programs)) and not any(source.costs.recompute_s):
        raise ValueError(
            f"{name} recomputes early, and costs have no recomputation: give --recompute-s with "
            "--backward-s, or --recompute full with a model, or recompute_s in --costs"
        )
    if args.overlap_tensor_parallel and not any(source.costs.tp_sync_s):
        raise ValueError(
            "pairs=on: there is no tensor-parallel collective in the costs: give "
            "--tp-sync-s, or --tp 2 or more with a model, or tp_sync_s in --costs"
        )
    if args.layers is not None and source.hardware is None:
        raise ValueError(
            f"--layers {spelled(args.layers)}: it is for the layers of a model; give --model and "
            "--cluster"
        )
    early = reduces_early(args, source, grad_sync)
    delayed = args.delay_weight_grads if early and args.delay_weight_grads != AUTO else None
    check_behind(args, source, may=early)
    choice = choice_of(args, compute.num_segments)
    if grad_sync == "deferred":
        choice = choice.changed(step="next")
    features = Features(
        gathers_params=source.gathers_params,
        shards_grads=args.shard_segments == "gradients",
        transfers=bool(args.overlap_tensor_parallel),  # sends stand behind both of a pair
        grad_sync=where_it_starts(args, grad_sync, compute.num_segments),
        reduces_early=early,
    )
    sliced = is_sliced(args, source)

    def simulated(order: Plan, source: Source) -> tuple[Plan, Timeline]:
        if delayed:  # the passes put some of them behind the backwards of their segments
            order = order.select(frozenset(Op) - WEIGHT_OPS)
        plan = lower(order, replace(choice, slices=None), features)
        if sliced:
            shares = slice_shares(args, plan, source)
            plan = lower(order, replace(choice, slices=True), features, shares=shares)
        return simulated_timeline(args, plan, source)

    def judged_with(order: Plan, source: Source) -> tuple[bool, float]:
        plan, timeline = simulated(order, source)
        hardware = _with_shards(source, plan).hardware
        fits = hardware is None or max(hardware.peaks(timeline)) <= hardware.usable_bytes
        return fits, timeline.period_s

    def judged_split(its: Namespace) -> tuple[bool, float]:
        try:
            counted, _ = with_recompute_counts(its, costs_of(its, compute), compute)
            return judged_with(compute, counted)
        except ValueError:  # not even with all layers recomputed
            return False, inf

    how = ""
    if args.layers == AUTO:
        args, how = with_chosen_layers(args, compute, source, judged_split)
        source = costs_of(args, compute)
    source, counts = with_recompute_counts(args, source, compute)

    def judged(order: Plan) -> tuple[bool, float]:
        return judged_with(order, source)

    if asks_to_choose(args):
        name, compute = chosen_order(args, source, judged)
    if args.replicate_optimizer:
        segments = chosen_segments(args, source, compute, grad_sync, reduces_early=early)
        name += f":{Part('optimizer', 'replicated', segments) if segments else 'optimizer=sharded'}"
        choice = choice.changed(segments, optimizer="replicated")
        source = replicated_source(source, compute, segments)
    plan, timeline = simulated(compute, source)
    if counts is not None:
        name += f" --recompute-layers {spelled(counts)}"
    if args.layers is not None:
        name += f" --layers {spelled(args.layers)}"
    if args.svg:
        args.svg.write_text(
            draw(timeline, title=name, caption=caption_of(plan, timeline)), encoding="utf-8"
        )
    if args.html:
        from megatron.fold3d.commands.playground_page import playground_page

        html = playground_page(args, name, plan, timeline, source.costs, grad_sync or "overlap")
        args.html.write_text(html, encoding="utf-8")
    bounds = bounds_of(plan, source.costs, source.nic_of_rank)
    source = _with_shards(source, plan)
    flops = None
    if source.hardware:
        flops = source.hardware.flops(timeline.period_s, plan.num_microbatches, counts)
    peaks = source.hardware.peaks(timeline) if source.hardware else []
    if args.json:
        found = report_json(name, plan, timeline, peaks, bounds, flops) | {"layers": args.layers}
        found |= {"left_out": args.job.left_out} if args.job is not None else {}
        write(json.dumps(found) + "\n")
    else:
        head, *rest = report_lines(name, plan, timeline, peaks, bounds, flops)
        if args.job is not None and args.job.left_out:
            rest.append(f"not in these estimates: {', '.join(args.job.left_out)}")
        write("\n".join((head, *layout_lines(args.layers, how), *rest)) + "\n")
    return OK if source.hardware is None else judge_memory(source.hardware, timeline, peaks)


def _with_shards(source: Source, plan: Plan) -> Source:
    """Return the source with the memory that a plan with FREE_PARAM leaves to others."""
    if source.hardware is None or not plan.has(*HOST_OPS):
        return source

    from megatron.fold3d.predict.cost_model.sharded_footprint import sharded_footprint

    hardware = source.hardware
    footprint = sharded_footprint(hardware.footprint, plan, source.gradient_bytes, hardware.setup)
    return replace(source, hardware=replace(hardware, footprint=footprint))


def _plan(args: Namespace) -> tuple[str, Plan]:
    """Return the name of the order and the order."""
    if args.iterations is not None and not 1 <= args.iterations <= _MOST_ITERATIONS:
        raise ValueError(
            f"--iterations {args.iterations}: a run has at least one, and all are alike long "
            f"before {_MOST_ITERATIONS}"
        )
    if args.plan_file is None:
        for flag, value in (("--pp", args.pp), ("--microbatches", args.microbatches)):
            if value is None:
                raise ValueError(f"--schedule {args.schedule} without {flag}: give {flag} N")
        return "stock " * args.is_stock + args.schedule, compute_plan(args)
    for flag, value in (
        ("--pp", args.pp),
        ("--segments", args.segments),
        ("--microbatches", args.microbatches),
        ("--shard-segments", args.shard_segments),
    ):
        if value is not None:
            raise ValueError(
                f"{flag} {value} with --schedule plan={args.plan_file}: a plan has its sizes; drop "
                f"{flag}"
            )
    if kept := [key for key in args.schedule_keys if key in _OF_ORDERS]:
        raise ValueError(
            f"{kept[0]}= with --schedule plan={args.plan_file}: a plan has its order; drop it"
        )
    return str(args.plan_file), plan_from(args.plan_file)
