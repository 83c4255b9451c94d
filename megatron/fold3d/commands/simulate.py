"""``fold3d simulate``: predict how long a plan takes and where its time goes."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import asdict, replace
from math import inf
from operator import gt
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

from megatron.fold3d.commands import auto_options, exposure_table
from megatron.fold3d.commands.console import OK, REJECTED, complain, write
from megatron.fold3d.commands.cost_options import Hardware, Source, add_cost_options, costs_of
from megatron.fold3d.commands.goodput_options import (
    add_checkpoint_option,
    goodput_lines,
    goodput_of,
)
from megatron.fold3d.commands.layer_options import layers_or_auto, with_chosen_layers
from megatron.fold3d.commands.order_options import chosen_order
from megatron.fold3d.commands.plan_source import in_words, plan_from, sizes
from megatron.fold3d.commands.schedule_options import (
    add_size_options,
    asks_to_choose,
    compute_plan,
    spelled,
)
from megatron.fold3d.commands.training_flags import layout_of
from megatron.fold3d.config.backward_share_flags import AUTO, share_or_auto
from megatron.fold3d.config.recompute_flags import counts_or_auto
from megatron.fold3d.config.weight_grad_flags import segments_or_auto
from megatron.fold3d.observe.breakdown import seconds_of, shown_columns
from megatron.fold3d.observe.exposure import Exposure, exposure, mean
from megatron.fold3d.observe.report.draw import caption_of, draw
from megatron.fold3d.observe.report.grid import to_text
from megatron.fold3d.observe.timeline import Lane, Timeline
from megatron.fold3d.plan.compile import Options, lower
from megatron.fold3d.plan.device_queues import CONNECTIONS
from megatron.fold3d.plan.ir import HOST_OPS, Op, Plan, PlanError
from megatron.fold3d.plan.schedules import SCHEDULES
from megatron.fold3d.plan.verify import verify
from megatron.fold3d.policy.replicated_segments import choose_replicated, stages_of, units
from megatron.fold3d.predict.cost_model.recompute_by_stage import (
    costs_with_counts,
    fewest_recomputed,
    footprint_with_counts,
)
from megatron.fold3d.predict.cost_model.sizes import replicated_bytes
from megatron.fold3d.predict.search.candidate_timeline import PAUSE_SHARE
from megatron.fold3d.predict.search.replicated_choice import (
    SimulatedIteration,
    with_replicated,
)
from megatron.fold3d.predict.search.simulated_shares import auto_shares, gathered_when_reduced
from megatron.fold3d.predict.simulator.execution import Device, Execution
from megatron.fold3d.predict.simulator.lower_bound import lower_bound_s
from megatron.fold3d.predict.simulator.simulate import simulate
from megatron.fold3d.predict.simulator.steady import steady_state

DESCRIPTION = """\
Predict how long a plan takes and where its time goes: computation, bubble,
and what of DP.sync and PP.sync nothing hides. Costs are numbers, a file, or
estimated from a model and a cluster; without any, a forward takes 1 second
and a backward 2."""

EXAMPLES = """\
examples:
  fold3d simulate --schedule aiao --pp 2 --segments 2 --microbatches 4
  fold3d simulate --schedule aiao --pp 2 --segments 4 --microbatches 4 --grad-sync-s 6 \\
      --delay-weight-grads 1,2
  fold3d simulate --schedule 1f1b --pp 4 --microbatches 8 --p2p-s 0.1 --grad-sync-s 6
  fold3d simulate --schedule 1f1b --pp 4 --microbatches 8 --p2p-s 0.4 --forwards-ahead auto \\
      --delay-weight-grads auto
  fold3d simulate --schedule auto --pp 2 --segments 4 --microbatches 4 --grad-sync-s 6
  fold3d simulate --plan-file my-plan.txt --costs costs.json --svg my-plan.svg
  fold3d simulate --schedule aiao --pp 4 --segments 3 --microbatches 8 --grad-sync-s 4 \\
      --html playground.html
  fold3d simulate --schedule aiao --pp 4 --segments 2 --microbatches 16 --model gpt3-18b \\
      --cluster a100x128-200g --tp 8 --micro-batch-size 4 --recompute full

  fold3d simulate --schedule 1f1b --pp 4 --microbatches 32 --model 48-1536-16 \\
      --cluster rtx3090x4 --layers auto

  fold3d simulate --schedule aiao --pp 1 --segments 4 --microbatches 8 --forward-s 0.02 \\
      --backward-s 0.06 --grad-sync-s 0.64 --cuda-connections 1 --grad-sync-launches 7

exit code: 0, 1 if the plan cannot run or does not fit into memory, 2 for a mistake"""

_MOST_ITERATIONS = 1000
_MOST_LAUNCHES = 10_000
_GRAD_SYNC: tuple[str, ...] = ("serial", "overlap", "deferred")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of this command."""
    order = parser.add_mutually_exclusive_group(required=True)
    order.add_argument(
        "--schedule",
        choices=(*SCHEDULES, auto_options.NAME),
        help="auto says what training with --schedule auto would try, and what it expects",
    )
    order.add_argument(
        "--plan-file", type=Path, metavar="FILE", help="what `fold3d plan` wrote; - is stdin"
    )
    add_size_options(parser, required=False)
    parser.add_argument(
        "--grad-sync",
        choices=_GRAD_SYNC,
        help="DP.sync after everything, behind other segments' backwards (default), or also "
        "behind the next iteration's forwards, the most urgent first",
    )
    parser.add_argument(
        "--backward-share",
        type=share_or_auto,
        metavar="X",
        help="DP.sync in order of issue, this share of it behind backwards and the rest behind the "
        "next iteration's forwards, as training's --backward-share has it; auto is what fits of "
        "each segment",
    )
    parser.add_argument(
        "--replicate-optimizer",
        type=segments_or_auto,
        metavar="N,N",
        help="with --distributed-optimizer of a model: all-reduce the gradients of these segments, "
        "and gather nothing for them; auto is what shortens the iteration",
    )
    parser.add_argument(
        "--preemptive-comm",
        action="store_true",
        help="PP.sync goes before DP.sync on a link, up to a pause budget",
    )
    parser.add_argument(
        "--cuda-connections",
        type=int,
        choices=CONNECTIONS,
        metavar="N",
        help="on GPUs with CUDA_DEVICE_MAX_CONNECTIONS=N: 1, 8 or 32 hardware queues that all "
        "streams share (default: a queue for each, and launches hold up nothing)",
    )
    parser.add_argument(
        "--grad-sync-launches",
        type=int,
        metavar="N",
        help="with --cuda-connections: collectives that DP.sync of a model chunk is launched as "
        "(default: 1; of a model, as training cuts it)",
    )
    parser.add_argument(
        "--dp-slices",
        action="store_true",
        help="DP.sync in slices, one before each computation that may hide it, as training's "
        "--dp-slices has it (default: with a model, --backward-share and one queue)",
    )
    parser.add_argument(
        "--iterations",
        type=int,
        metavar="N",
        help="(default: 1; with --grad-sync deferred as many as it takes to settle)",
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the diagram here")
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write a page that simulates schedules side by side, with sliders that begin here",
    )
    parser.add_argument("--json", action="store_true", help="the result as one JSON object")
    parser.add_argument(
        "--recompute-layers",
        type=counts_or_auto,
        metavar="N,N",
        help="with --recompute full of a model, recompute so many layers of each stage; auto is "
        "the fewest that fit the GPUs' memory",
    )
    parser.add_argument(
        "--layers",
        type=layers_or_auto,
        metavar="N,N",
        help="of a model, so many layers in each stage (default: equally many); auto is what makes "
        "the iteration shortest and fits the GPUs' memory",
    )
    add_cost_options(parser)
    add_checkpoint_option(parser)


def run(args: Namespace) -> int:
    """Print what is predicted; returns the exit code."""
    if args.schedule == auto_options.NAME:
        write(auto_options.what_auto_would_try(args))
        return OK
    name, compute = _plan(args)
    try:
        if args.plan_file:  # a generated schedule is known to run
            verify(compute)
    except PlanError as error:
        complain(f"{name}: {error}")
        return REJECTED
    grad_sync = _grad_sync(args)
    if compute.has(Op.REDUCE_GRAD) and grad_sync is not None:
        raise ValueError(
            f"--grad-sync {grad_sync} or a share: the plan has its own DP.sync; drop it"
        )
    _check_device(args, grad_sync)
    source = costs_of(args, compute)
    if compute.has(Op.RECOMPUTE) and not any(source.costs.recompute_s):
        raise ValueError(
            f"{name} recomputes early, and costs have no recomputation: give --recompute-s with "
            "--backward-s, or --recompute full with a model, or recompute_s in --costs"
        )
    if args.overlap_tensor_parallel and not any(source.costs.tp_sync_s):
        raise ValueError(
            "--overlap-tensor-parallel: there is no tensor-parallel collective in the costs: give "
            "--tp-sync-s, or --tp 2 or more with a model, or tp_sync_s in --costs"
        )
    if args.layers is not None and source.hardware is None:
        raise ValueError(
            f"--layers {spelled(args.layers)}: it is for the layers of a model; give --model and "
            "--cluster"
        )
    options = Options(
        gathers_params=source.gathers_params,
        overlap_tensor_parallel=bool(args.overlap_tensor_parallel),
        shards_grads=args.shard_segments == "gradients",
        transfers=bool(args.overlap_tensor_parallel),  # sends stand behind both of a pair
        grad_sync="serial" if grad_sync == "serial" else "overlap",
        deferred_stages=range(compute.num_stages if grad_sync == "deferred" else 0),
    )

    sliced = _is_sliced(args, source)

    def simulated(order: Plan, source: Source) -> tuple[Plan, Timeline]:
        plan = lower(order, options)
        if sliced:
            plan = lower(order, replace(options, slice_shares=_slice_shares(args, plan, source)))
        return plan, _timeline(args, plan, source, deferred=grad_sync == "deferred")

    def judged_with(order: Plan, source: Source) -> tuple[bool, float]:
        plan, timeline = simulated(order, source)
        hardware = _with_shards(source, plan).hardware
        fits = hardware is None or max(hardware.peaks(timeline)) <= hardware.usable_bytes
        return fits, timeline.period_s

    def judged_split(its: Namespace) -> tuple[bool, float]:
        try:
            return judged_with(compute, _with_counts(its, costs_of(its, compute), compute)[0])
        except ValueError:  # not even with all layers recomputed
            return False, inf

    how = ""
    if args.layers == AUTO:
        args, how = with_chosen_layers(args, compute, source, judged_split)
        source = costs_of(args, compute)
    source, counts = _with_counts(args, source, compute)

    def judged(order: Plan) -> tuple[bool, float]:
        return judged_with(order, source)

    if asks_to_choose(args):
        name, compute = chosen_order(args, source, judged)
    if args.replicate_optimizer is not None:
        segments = _replicated(args, source, compute, grad_sync)
        name += f" --replicate-optimizer {spelled(segments) or 'none'}"
        options = replace(options, replicated_stages=stages_of(segments, compute.num_ranks))
        source = _with_replicated(source, compute, segments)
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
    bound_s = lower_bound_s(plan, source.costs, source.nic_of_rank)
    source = _with_shards(source, plan)
    peaks = source.hardware.peaks(timeline) if source.hardware else []
    known = source.hardware
    left = goodput_of(args, (known.shape, known.cluster, known.setup) if known else None)
    if args.json:
        found = _as_json(name, plan, timeline, peaks, bound_s) | {"layers": args.layers}
        write(json.dumps(found | {"goodput": left and asdict(left)}) + "\n")
    else:
        head, *rest = _lines(name, plan, timeline, peaks, bound_s)
        rest += goodput_lines(left, timeline.period_s)
        write("\n".join((head, *_layout_lines(args.layers, how), *rest)) + "\n")
    return OK if source.hardware is None else _judge_memory(source.hardware, timeline, peaks)


def _replicated(
    args: Namespace, source: Source, order: Plan, grad_sync: str | None
) -> tuple[int, ...]:
    """Return the segments whose optimizer steps every replica takes in full."""
    given = args.replicate_optimizer
    found = f"--replicate-optimizer {given if given == AUTO else spelled(given)}"
    if source.hardware is None or not source.gathers_params:
        raise ValueError(
            f"{found}: it chooses which segments are updated in shards; give --model, --cluster "
            "and --distributed-optimizer"
        )
    if grad_sync is not None or args.cuda_connections is not None or order.has(Op.GATHER_PARAM):
        raise ValueError(
            f"{found}: it is simulated where an iteration waits for all gradients, with a queue "
            "for each stream; drop --grad-sync, --backward-share, --cuda-connections and gathers "
            "of a plan's own"
        )
    if given != AUTO:
        if unknown := [segment for segment in given if segment >= order.num_segments]:
            raise ValueError(
                f"{found}: there is no segment {unknown[0]}, a rank holds {order.num_segments}; "
                f"give some of 0 to {order.num_segments - 1}"
            )
        return tuple(given)

    hardware = source.hardware
    iteration = SimulatedIteration(order, (), source.costs, source.nic_of_rank, source.routes)
    peaks = hardware.peaks(iteration.timeline(()))

    def fits(segments: tuple[int, ...]) -> bool:
        more = _more_bytes(hardware, order, segments)
        return max(map(sum, zip(peaks, more, strict=True))) <= hardware.usable_bytes

    tied = order.num_ranks > 1 and not hardware.shape.untied
    return choose_replicated(units(order.num_segments, tied=tied), iteration.seconds, fits)[0]


def _with_replicated(source: Source, order: Plan, segments: tuple[int, ...]) -> Source:
    """Return the costs and the memory of a model some of whose segments are replicated."""
    assert source.hardware is not None
    footprint = source.hardware.footprint
    more = zip(footprint.static_bytes, _more_bytes(source.hardware, order, segments), strict=True)
    footprint = replace(footprint, static_bytes=tuple(map(sum, more)))
    return replace(
        source,
        costs=with_replicated(source.costs, stages_of(segments, order.num_ranks)),
        hardware=replace(source.hardware, footprint=footprint),
    )


def _more_bytes(hardware: Hardware, order: Plan, segments: tuple[int, ...]) -> list[float]:
    return replicated_bytes(
        hardware.shape,
        hardware.setup,
        order.num_ranks,
        hardware.layers,
        stages_of(segments, order.num_ranks),
    )


def _with_counts(
    args: Namespace, source: Source, plan: Plan
) -> tuple[Source, tuple[int, ...] | None]:
    """Return costs with a number of recomputed layers for each stage, and the numbers if asked."""
    hardware, given = source.hardware, args.recompute_layers
    if given is None:
        return source, None
    found = given if given == AUTO else ",".join(map(str, given))
    if hardware is None or hardware.setup.recompute != "full":
        raise ValueError(
            f"--recompute-layers {found}: it is for a model whose layers are recomputed; give "
            "--model and --cluster with --recompute full"
        )
    shape, setup, footprint = hardware.shape, hardware.setup, hardware.footprint
    if args.forwards_ahead == AUTO and given == AUTO:
        raise ValueError(
            "--recompute-layers auto with --forwards-ahead auto: how many forwards run ahead "
            "decides what fits; give a number for one of the two"
        )
    layers = hardware.layers
    if given == AUTO:
        counts = fewest_recomputed(plan, shape, setup, footprint, hardware.usable_bytes, layers)
    else:
        counts = given
        if len(counts) != plan.num_stages or any(map(gt, counts, layers)):
            raise ValueError(
                f"--recompute-layers {found}: a plan of {plan.num_stages} stages needs as many "
                f"numbers, and stages have {','.join(map(str, layers))} layers; give such"
            )
    footprint = footprint_with_counts(footprint, shape, setup, counts, layers)
    hardware = replace(hardware, footprint=footprint)
    costs = costs_with_counts(source.costs, shape, counts, layers)
    return replace(source, costs=costs, hardware=hardware), counts


def _with_shards(source: Source, plan: Plan) -> Source:
    """Return the source with the memory that a plan with FREE_PARAM leaves to others."""
    if source.hardware is None or not any(map(plan.has, HOST_OPS)):
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
        return args.schedule, compute_plan(args)
    for name in (
        *("pp", "segments", "microbatches", "aiao_last_segment", "group_size"),
        *("delay_weight_grads", "forwards_ahead", "recompute_early", "most_activations"),
        *("overlap_tensor_parallel", "shard_segments"),
    ):
        if (value := getattr(args, name)) is not None:
            flag = "--" + name.replace("_", "-")
            if value is True:
                raise ValueError(f"{flag} with --plan-file: a plan has its order; drop {flag}")
            raise ValueError(
                f"{flag} {spelled(value)} with --plan-file: a plan has its sizes; drop {flag}"
            )
    return str(args.plan_file), plan_from(args.plan_file)


def _grad_sync(args: Namespace) -> str | None:
    """Return where DP.sync goes."""
    share = args.backward_share
    if share is None:
        return str(args.grad_sync) if args.grad_sync else None
    if share != AUTO and not 0 <= share <= 1:
        raise ValueError(f"--backward-share {share}: it is a share of DP.sync, from 0 to 1")
    if args.grad_sync is not None:
        raise ValueError(
            f"--backward-share {share} with --grad-sync {args.grad_sync}: a share has its own "
            "order; drop one"
        )
    return "deferred"


def _is_sliced(args: Namespace, source: Source) -> bool:
    """Tell whether DP.sync is cut into slices: if asked to, or where training would."""
    if args.dp_slices or args.grad_sync_launches is not None or source.hardware is None:
        return bool(args.dp_slices)
    return args.cuda_connections == 1 and args.backward_share is not None


def _slice_shares(args: Namespace, plan: Plan, source: Source) -> tuple[float, ...]:
    """Return the share of each stage's slices behind the backwards."""
    share = args.backward_share
    if share == AUTO:  # slices hold up nothing, so they are chosen as if nothing could
        execution = Execution(
            nic_of_rank=source.nic_of_rank, routes=source.routes, flush=False, in_order=True
        )
        return auto_shares(plan, source.costs, execution)
    return (1.0 if share is None else share,) * plan.num_stages


def _check_device(args: Namespace, grad_sync: str | None) -> None:
    """Refuse options that GPUs with shared queues do not support."""
    connections, launches = args.cuda_connections, args.grad_sync_launches
    if args.dp_slices and launches is not None:
        raise ValueError(
            f"--dp-slices with --grad-sync-launches {launches}: a slice is one collective; drop one"
        )
    if args.dp_slices and grad_sync is not None and args.backward_share is None:
        raise ValueError(
            f"--dp-slices with --grad-sync {grad_sync}: slices follow each other in the plan's "
            "order; drop one, or give --backward-share"
        )
    if launches is not None and connections is None:
        raise ValueError(
            f"--grad-sync-launches {launches} without --cuda-connections: where every stream has a "
            "queue a launch holds up nothing; give --cuda-connections 1, or drop it"
        )
    if connections is None:
        return
    if launches is not None and not 1 <= launches <= _MOST_LAUNCHES:
        raise ValueError(
            f"--grad-sync-launches {launches}: a model chunk's DP.sync is at least one collective "
            f"and {_MOST_LAUNCHES} at most"
        )
    if grad_sync == "deferred" and args.backward_share is None:
        raise ValueError(
            f"--grad-sync deferred with --cuda-connections {connections}: NCCL runs DP.sync in the "
            "order of its launch, not the most urgent first; give --backward-share"
        )
    if args.preemptive_comm and connections == 1:
        raise ValueError(
            "--preemptive-comm with --cuda-connections 1: in one queue nothing overtakes what was "
            "launched before; give 8 or 32, or drop --preemptive-comm"
        )


def _device(args: Namespace, plan: Plan, source: Source) -> Device | None:
    """Return the GPUs that run the plan, if they share queues."""
    if args.cuda_connections is None:
        return None
    if args.grad_sync_launches is not None:
        launches = (args.grad_sync_launches,) * plan.num_stages
    else:
        deferred = args.backward_share is not None
        launches = source.launches(deferred=deferred, connections=args.cuda_connections)
    return Device(
        connections=args.cuda_connections,
        launches=launches,
        in_backward=args.grad_sync != "serial",
    )


def _timeline(args: Namespace, plan: Plan, source: Source, *, deferred: bool) -> Timeline:
    execution = Execution(
        device=_device(args, plan, source),
        nic_of_rank=source.nic_of_rank,
        routes=source.routes,
        preemptive=args.preemptive_comm,
        pause_share=PAUSE_SHARE,
        grad_sync_order="edf" if args.grad_sync == "deferred" else "fifo",
        flush=not deferred,
        in_order=True,
        overlap_tensor_parallel=bool(args.overlap_tensor_parallel),
    )
    if (share := args.backward_share) is not None and not plan.has(Op.REDUCE_SLICE):
        shares = (
            auto_shares(plan, source.costs, execution)
            if share == AUTO
            else (share,) * plan.num_stages
        )
        execution = replace(execution, backward_share=shares)
        plan = gathered_when_reduced(plan, source.costs, shares)
    if args.iterations is None and deferred:
        return steady_state(plan, source.costs, execution)
    return simulate(plan, source.costs, execution, iterations=args.iterations or 1)


def _lines(
    name: str, plan: Plan, timeline: Timeline, peaks: list[float], bound_s: float
) -> Iterator[str]:
    row, iterations = mean(exposure(timeline)), len(timeline.iteration_ends_s(0))
    counts = " ".join(map(str, sizes(plan)["peak_activations"]))
    yield f"{name}: {in_words(plan.num_ranks, plan.num_segments, plan.num_microbatches)}"
    last = f" (the last of {iterations}; makespan {timeline.makespan_s:.6g} s)"
    yield f"iteration         {timeline.period_s:.6g} s{last * (iterations > 1)}"
    yield (
        f"lower bound       {bound_s:.6g} s  of any order, without DP.sync: "
        f"{timeline.period_s / bound_s:.2f} x of it"
        if bound_s
        else "lower bound       0 s"
    )
    yield f"bubble            {row.bubble_ratio:.1%} of computation"
    yield f"peak activations  {counts}  per rank"
    if peaks:
        yield f"peak memory       {' '.join(f'{b / 2**30:.1f}' for b in peaks)}  GiB per rank"
    yield ""
    yield from _table(row)
    if grid := _grid(timeline):
        yield ""
        yield grid


def _layout_lines(layers: tuple[int, ...] | None, how: str) -> Iterator[str]:
    """Yield the flag of training for layers that were given or chosen, and how they were."""
    if layers is not None:
        chosen = f"  {how}" if how else ""
        yield f"layout            --pipeline-model-parallel-layout '{layout_of(layers)}'{chosen}"


def _table(row: Exposure) -> Iterator[str]:
    """Return the parts of the last iteration, mean over ranks, as in the paper's Table II."""
    shown = shown_columns(row)
    times_s = seconds_of(row, shown)
    yield exposure_table.titles("         ", shown)
    yield exposure_table.line("seconds  ", times_s)
    yield exposure_table.line("share    ", map(row.share, times_s), ".1%")


def _grid(timeline: Timeline) -> str:
    """Return the computations as text if that fits the terminal."""
    width, height = get_terminal_size(fallback=(100, 24))
    lanes = [timeline.lane(rank, Lane.COMPUTE) for rank in range(timeline.num_ranks)]
    shortest_s = min((s.duration_s for spans in lanes for s in spans if s.duration_s), default=0.0)
    if not shortest_s or timeline.makespan_s / shortest_s > width * height:
        return ""
    text = to_text(timeline, width=width).rstrip("\n")
    return text if text.count("\n") < height else ""


def _as_json(
    name: str, plan: Plan, timeline: Timeline, peaks: list[float], bound_s: float
) -> dict[str, Any]:
    rows = exposure(timeline)
    row = mean(rows)
    return {
        "name": name,
        **sizes(plan),
        "iterations": len(timeline.iteration_ends_s(0)),
        "makespan_s": timeline.makespan_s,
        "period_s": timeline.period_s,
        "lower_bound_s": bound_s,
        "bubble_ratio": row.bubble_ratio,
        "exposure": row.to_dict(),
        "exposure_of_rank": [r.to_dict() for r in rows],
        "peak_bytes": peaks or None,
    }


def _judge_memory(hardware: Hardware, timeline: Timeline, peaks: list[float]) -> int:
    limit = hardware.usable_bytes
    if max(peaks) <= limit:
        return OK
    complain(
        f"rank {peaks.index(max(peaks))} needs {max(peaks) / 2**30:.1f} GiB, a GPU of "
        f"{hardware.cluster.name} has {limit / 2**30:.1f} to use; {hardware.nearest_fit(timeline)}"
    )
    return REJECTED
