"""``fold3d simulate``: predict how long a plan takes and where its time goes."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import ceil
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

from megatron.fold3d.commands import exposure_table
from megatron.fold3d.commands.console import OK, REJECTED, complain, write
from megatron.fold3d.commands.cost_options import Hardware, Source, add_cost_options, costs_of
from megatron.fold3d.commands.plan_source import in_words, plan_from, sizes
from megatron.fold3d.commands.schedule_options import add_size_options, compute_plan
from megatron.fold3d.config.backward_share_flags import AUTO, share_or_auto
from megatron.fold3d.observe.breakdown import seconds_of, shown_columns
from megatron.fold3d.observe.exposure import Exposure, exposure, mean
from megatron.fold3d.observe.report.draw import caption_of, draw
from megatron.fold3d.observe.report.grid import to_text
from megatron.fold3d.observe.timeline import Lane, Timeline
from megatron.fold3d.plan.compile import Options, lower
from megatron.fold3d.plan.device_queues import CONNECTIONS
from megatron.fold3d.plan.ir import Op, Plan, PlanError
from megatron.fold3d.plan.schedules import SCHEDULES
from megatron.fold3d.plan.verify import verify
from megatron.fold3d.policy.forwards_ahead import forwards_that_hide
from megatron.fold3d.predict.search.candidate_timeline import PAUSE_SHARE
from megatron.fold3d.predict.search.simulated_shares import auto_shares
from megatron.fold3d.predict.simulator.execution import Device, Execution
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
  fold3d simulate --plan-file my-plan.txt --costs costs.json --svg my-plan.svg
  fold3d simulate --schedule aiao --pp 4 --segments 2 --microbatches 16 --model gpt3-18b \\
      --cluster a100x128-200g --tp 8 --micro-batch-size 4 --recompute full

  fold3d simulate --schedule aiao --pp 1 --segments 4 --microbatches 8 --forward-s 0.02 \\
      --backward-s 0.06 --grad-sync-s 0.64 --cuda-connections 1 --grad-sync-launches 7

exit code: 0, 1 if the plan cannot run or does not fit into memory, 2 for a mistake"""

_MOST_ITERATIONS = 1000
_DIGITS = 9  # of seconds: equal times are equal
_MOST_LAUNCHES = 10_000
_GRAD_SYNC: tuple[str, ...] = ("serial", "overlap", "deferred")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of this command."""
    order = parser.add_mutually_exclusive_group(required=True)
    order.add_argument("--schedule", choices=SCHEDULES)
    order.add_argument(
        "--plan-file", type=Path, metavar="FILE", help="what `fold3d plan` wrote; - is stdin"
    )
    add_size_options(parser, required=False, auto=True)
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
        "--iterations",
        type=int,
        metavar="N",
        help="(default: 1; with --grad-sync deferred as many as it takes to settle)",
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the diagram here")
    parser.add_argument("--json", action="store_true", help="the result as one JSON object")
    add_cost_options(parser)


def run(args: Namespace) -> int:
    """Print what is predicted; returns the exit code."""
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
    options = Options(
        gathers_params=source.gathers_params,
        transfers=False,
        grad_sync="serial" if grad_sync == "serial" else "overlap",
        deferred_stages=range(compute.num_stages if grad_sync == "deferred" else 0),
    )

    def simulated(order: Plan) -> tuple[Plan, Timeline]:
        plan = lower(order, options)
        return plan, _timeline(args, plan, source, deferred=grad_sync == "deferred")

    if args.forwards_ahead == AUTO:
        name, plan, timeline = _auto_ahead(args, source, simulated)
    else:
        plan, timeline = simulated(compute)
    if args.svg:
        args.svg.write_text(
            draw(timeline, title=name, caption=caption_of(plan, timeline)), encoding="utf-8"
        )
    peaks = source.hardware.peaks(timeline) if source.hardware else []
    if args.json:
        write(json.dumps(_as_json(name, plan, timeline, peaks)) + "\n")
    else:
        write("\n".join(_lines(name, plan, timeline, peaks)) + "\n")
    return OK if source.hardware is None else _judge_memory(source.hardware, timeline, peaks)


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
        *("delay_weight_grads", "forwards_ahead", "recompute_early"),
    ):
        if (value := getattr(args, name)) is not None:
            flag = "--" + name.replace("_", "-")
            value = ",".join(map(str, value)) if isinstance(value, tuple) else value
            raise ValueError(f"{flag} {value} with --plan-file: a plan has its sizes; drop {flag}")
    return str(args.plan_file), plan_from(args.plan_file)


def _auto_ahead(
    args: Namespace, source: Source, simulated: Callable[[Plan], tuple[Plan, Timeline]]
) -> tuple[str, Plan, Timeline]:
    """Return the name, plan and timeline of the fastest number of forwards ahead, or the least.

    Only numbers that fit the GPUs' memory count, if it is known and any fits. More forwards than
    hide the transfers can still help while the pipeline fills, on a link that is shared.
    """
    segments = 1 if args.segments is None else args.segments
    last = range((segments - 1) * args.pp, segments * args.pp)
    costs = source.costs
    forward_s, backward_s = max(
        ((costs.forward_s[stage], costs.backward_s[stage]) for stage in last), key=sum
    )
    transfer_s = costs.p2p_latency_s + costs.p2p_s
    most = forwards_that_hide(forward_s, backward_s, transfer_s) + 1
    most = max(1, min(most, ceil(args.microbatches / max(1, args.pp - 1))))
    best: tuple[tuple[bool, float, int], Plan, Timeline] | None = None
    for ahead in range(1, most + 1):
        plan, timeline = simulated(compute_plan(args, ahead))
        hardware = source.hardware
        fits = hardware is None or max(hardware.peaks(timeline)) <= hardware.usable_bytes
        rank = (not fits, round(timeline.period_s, _DIGITS), ahead)
        if best is None or rank < best[0]:
            best = rank, plan, timeline
    assert best is not None
    (_, _, ahead), plan, timeline = best
    return f"{args.schedule} --forwards-ahead {ahead}", plan, timeline


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


def _check_device(args: Namespace, grad_sync: str | None) -> None:
    """Refuse options that GPUs with shared queues do not support."""
    connections, launches = args.cuda_connections, args.grad_sync_launches
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
        launches = source.launches(deferred=args.backward_share is not None)
    return Device(
        connections=args.cuda_connections,
        launches=launches,
        in_backward=args.grad_sync != "serial",
    )


def _timeline(args: Namespace, plan: Plan, source: Source, *, deferred: bool) -> Timeline:
    execution = Execution(
        device=_device(args, plan, source),
        nic_of_rank=source.nic_of_rank,
        preemptive=args.preemptive_comm,
        pause_share=PAUSE_SHARE,
        grad_sync_order="edf" if args.grad_sync == "deferred" else "fifo",
        flush=not deferred,
        in_order=True,
    )
    if (share := args.backward_share) is not None:
        shares = (
            auto_shares(plan, source.costs, execution)
            if share == AUTO
            else (share,) * plan.num_stages
        )
        execution = replace(execution, backward_share=shares)
    if args.iterations is None and deferred:
        return steady_state(plan, source.costs, execution)
    return simulate(plan, source.costs, execution, iterations=args.iterations or 1)


def _lines(name: str, plan: Plan, timeline: Timeline, peaks: list[float]) -> Iterator[str]:
    row, iterations = mean(exposure(timeline)), len(timeline.iteration_ends_s(0))
    counts = " ".join(map(str, sizes(plan)["peak_activations"]))
    yield f"{name}: {in_words(plan.num_ranks, plan.num_segments, plan.num_microbatches)}"
    last = f" (the last of {iterations}; makespan {timeline.makespan_s:.6g} s)"
    yield f"iteration         {timeline.period_s:.6g} s{last * (iterations > 1)}"
    yield f"bubble            {row.bubble_ratio:.1%} of computation"
    yield f"peak activations  {counts}  per rank"
    if peaks:
        yield f"peak memory       {' '.join(f'{b / 2**30:.1f}' for b in peaks)}  GiB per rank"
    yield ""
    yield from _table(row)
    if grid := _grid(timeline):
        yield ""
        yield grid


def _table(row: Exposure) -> Iterator[str]:
    """Where the last iteration went, mean over ranks: the columns of the paper's Table II."""
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


def _as_json(name: str, plan: Plan, timeline: Timeline, peaks: list[float]) -> dict[str, Any]:
    rows = exposure(timeline)
    row = mean(rows)
    return {
        "name": name,
        **sizes(plan),
        "iterations": len(timeline.iteration_ends_s(0)),
        "makespan_s": timeline.makespan_s,
        "period_s": timeline.period_s,
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
