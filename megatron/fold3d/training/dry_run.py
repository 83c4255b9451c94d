"""``--check``: describes a run with its memory and time, without a GPU and without building it.

The same functions refuse options here and in training; this file adds the planner's estimates. If
an estimate is not possible, the check still succeeds; it fails if the model exceeds its GPUs.
"""

import os
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from shlex import quote

from megatron.fold3d.commands.auto_tries import lines as lines_of_auto
from megatron.fold3d.commands.auto_tries import tries
from megatron.fold3d.commands.console import counted
from megatron.fold3d.commands.cost_sources import on_cluster, on_queues
from megatron.fold3d.commands.job import left_out, run_of
from megatron.fold3d.commands.megatron_flags import shape_of
from megatron.fold3d.commands.plan_sizes import in_words
from megatron.fold3d.config.bucket_flags import has_one_queue
from megatron.fold3d.config.fold3d_config import Fold3DConfig
from megatron.fold3d.config.gpu_settings import has_many_queues
from megatron.fold3d.config.job_sizes import ranks_of_model
from megatron.fold3d.config.schedule_flags import word_of
from megatron.fold3d.observe.digits import seconds
from megatron.fold3d.observe.exposure import exposure, mean
from megatron.fold3d.observe.timeline import Timeline
from megatron.fold3d.plan.choice import file_of
from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.plan.schedule_word import AUTO
from megatron.fold3d.predict.cost_model.cluster import NODES, Cluster, cluster
from megatron.fold3d.predict.search.planner import strongest_stock
from megatron.fold3d.predict.search.settled import PredictedRun

_GIB = 2**30


def set_world_size(args: Namespace, known: Cluster | None) -> None:
    """Set the number of ranks in the namespace and in the environment.

    It is torchrun's, or the cluster's, or the number that one replica of the model takes.

    Raises:
        ValueError: torchrun and the cluster differ.
    """
    started = os.environ.get("WORLD_SIZE")
    if known is not None and started not in (None, str(known.num_gpus)):
        raise ValueError(
            f"--check {known.name}: it has {known.num_gpus} GPUs, and this job {started} "
            "ranks; check without torchrun, or name as many"
        )
    if known is not None:
        args.world_size = known.num_gpus
    elif started is None:
        args.world_size = ranks_of_model(args)
    os.environ["WORLD_SIZE"] = str(args.world_size)


def report(args: Namespace, config: Fold3DConfig, plan: Plan | None) -> Iterator[str]:
    """Yield lines that describe a run that can begin, with the planner's estimates.

    Args:
        plan: the plan of an iteration; None for stock Megatron's schedule.

    Raises:
        ValueError: the model does not fit into the cluster's GPUs.
    """
    sizes = {
        "dp": args.data_parallel_size,
        "pp": args.pipeline_model_parallel_size,
        "tp": args.tensor_model_parallel_size,
        "cp": args.context_parallel_size,
        "ep": args.expert_model_parallel_size,
    }
    split = " ".join(f"{name}={size}" for name, size in sizes.items() if size > 1 or name == "dp")
    yield f"can begin: {counted(args.world_size, 'ranks')}, {split}"
    if plan is None:
        yield "plan: stock Megatron's schedule"
    else:
        shape = in_words(plan.num_ranks, plan.num_segments, plan.num_microbatches)
        named = word_of(args).order
        begins = " begins in stock's order" if named == AUTO else ""
        yield f"plan: {file_of(named) or named}{begins}, {shape}, verified"
    known = cluster(args.check) if args.check else None
    try:
        run = planned(args, config, known)
        found = run.simulated()
        timeline, peaks = found.timeline, run.peaks(found)
        of_auto = tries(run, config) if known and config.choice.order == AUTO else ()
        alike = None
        if of_auto and known is not None and run.shape is not None:
            alike = strongest_stock(run.shape, known, run.candidate)
    except ValueError as error:  # of the planner; the run does not ask it
        yield f"no estimate of memory and time: {error}"
        return
    of_ranks = " ".join(f"{peak / _GIB:.1f}" for peak in peaks)
    yield f"memory: {of_ranks} GiB per pipeline rank, estimated"
    if known is None:
        yield "no prediction of time; --check CLUSTER, such as a100x128-200g, adds one"
    else:
        yield from _on_cluster(known, peaks, timeline)
    if of_auto:
        stock, *tried = of_auto
        yield "--schedule auto measures, and is then predicted to try:"
        yield from (f"  {line}" for line in lines_of_auto(stock, tried, alike))
    if known is not None:
        yield _next(known, args.check)
    if notes := [*_left_out(args, known)]:
        yield f"not in these estimates: {', '.join(notes)}"


def _next(known: Cluster, name: str) -> str:
    """Return what trains the job beside the strongest of stock."""
    gpus = known.gpus_per_node
    return (
        f"next: CLUSTER={quote(name)} sbatch --nodes={known.num_nodes} --ntasks-per-node={gpus} "
        f"--gpus-per-node={gpus} scripts/slurm/compare.sbatch, and the job's flags without --check "
        "and --schedule"
    )


def planned(args: Namespace, config: Fold3DConfig, known: Cluster | None) -> PredictedRun:
    """Return the planner's view of a run, settled.

    Raises:
        ValueError: the planner does not model it.
    """
    if args.use_torch_fsdp2 or args.use_megatron_fsdp:
        raise ValueError("the planner does not model FSDP, whose replicas share all states")
    shape, hardware = shape_of(args), known
    if hardware is None:  # memory does not depend on them
        hardware = replace(NODES["a100"], num_nodes=args.world_size, gpus_per_node=1)
    costs = on_cluster(shape, hardware)
    if has_many_queues():
        costs = on_queues(costs, None)
    return run_of(args, config, costs, shape, known).settled()


def _on_cluster(known: Cluster, peaks: Sequence[float], timeline: Timeline) -> Iterator[str]:
    """Yield what a run takes of a cluster's memory and time.

    Raises:
        ValueError: it is more than the GPUs have.
    """
    if remark := known.remark_on_memory(peaks):
        yield f"  {remark}"
    row = mean(exposure(timeline))
    parts = {"bubble": row.bubble_s, "DP.sync": row.grad_sync_s, "PP.sync": row.p2p_s}
    exposed = ", ".join(f"{name} {row.share(part_s):.0%}" for name, part_s in parts.items())
    time = seconds(timeline.period_s)
    yield f"iteration: {time} on {known.name}, predicted: {exposed} of it"


def _left_out(args: Namespace, known: Cluster | None) -> Iterator[str]:
    """Yield what changes memory or time, and the estimates ignore."""
    yield from left_out(args)
    if args.recompute_layers == AUTO and known is None:
        yield "--recompute-layers auto"
    if args.tensor_model_parallel_size == 1 and has_one_queue(args):
        yield "one hardware queue"
