"""Binds fold3d to Megatron: chooses a run's features and patches from its configuration."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from fold3d_patches.registry import Patch, apply
from megatron.fold3d.upstream import versions

if TYPE_CHECKING:
    from megatron.fold3d.config.fold3d_config import Fold3DConfig
    from megatron.fold3d.plan.ir import Plan
    from megatron.fold3d.runtime.feature import Feature
    from megatron.fold3d.runtime.plans import Plans

    Part = Feature | Patch  # of what a capability adds to a run


def install_platform(device: str) -> ExitStack:
    """Install the patches that Megatron's validation of flags needs; closing the stack undoes them.

    Raises:
        PatchError: the installed Megatron is not the one the patches were written for.
    """
    from fold3d_patches import compile_helpers, cpu, many_queues, parsed_once, unfused_layers
    from megatron.fold3d.config.gpu_settings import has_fusion_kernel, has_many_queues

    patches = [*compile_helpers.PATCHES]
    if versions.pretrain_parses_flags():
        patches += parsed_once.PATCHES
    if device == "cpu":
        patches += cpu.patches()
    else:
        patches += () if has_fusion_kernel() else unfused_layers.PATCHES
        patches += many_queues.PATCHES if has_many_queues() else ()
    return apply(patches)


def check_schedule(config: "Fold3DConfig", num_microbatches: int) -> "Plan | None":
    """Return the plan of an iteration, None for stock Megatron's schedule; patches nothing.

    Raises:
        PlanError: as `install_schedule`.
        ValueError: torch cannot mark packets as ``config`` asks.
    """
    from megatron.fold3d.runtime.plans import Plans

    plan = Plans(config).checked(num_microbatches)
    _marks(config)
    return plan


def install_schedule(
    config: "Fold3DConfig", num_microbatches: int, ranks_here: Sequence[int] = ()
) -> ExitStack:
    """Make Megatron train under the schedule of ``config``; closing the stack restores it.

    Args:
        ranks_here: the pipeline ranks of this node's processes.

    Raises:
        PatchError: as above.
        PlanError: the schedule, or the user's plan, cannot run ``num_microbatches`` of this run.
        HostMemoryError: this node has too little memory for the offloaded activations.
    """
    from megatron.fold3d.runtime.plans import Plans

    plans = Plans(config)
    plan = plans.checked(num_microbatches)
    if config.offload_activations == "on" and plan is not None:
        from megatron.fold3d.runtime.offload import host_memory

        host_memory.check_node(plan, config.saved_bytes, ranks_here)
    run = _Run(config, plans, num_local=max(1, len(ranks_here)))
    patches, executor = [*_marks(config)], None
    if run.delta is not None:  # first: a trace of gathers is around them
        patches += _ours("delta_gather:patches")(run.delta)
    if run.sums is not None:
        patches += _ours("coded_sums:patches")(run.sums)
    if run.tracer is not None:
        patches += _traced(run)
    if config.choice.order != "stock":
        parts = [*_parts(run)]
        features = [part for part in parts if not isinstance(part, Patch)]
        executor = _runtime("executor:Executor")(plans, features)
        patches.append(_ours("schedule.get_forward_backward_func:patch")(executor))
        patches += _ours("schedule.script_settings:PATCHES")
        patches += [part for part in parts if isinstance(part, Patch)]
        if versions.sums_are_awaited_once():
            patches += _ours("schedule.finished_sums:PATCHES")
    with apply(patches) as stack:
        if executor is not None:
            stack.push(executor)
        elif run.tracer is not None:
            stack.enter_context(run.tracer)
        stack.push(partial(_tell, [coder for coder in (run.delta, run.sums) if coder is not None]))
        return stack.pop_all()


def _tell(coders: Sequence[Any], kind: type[BaseException] | None, *_: object) -> None:
    """Let coders say at the end of a run what they have sent, unless it failed."""
    if kind is None or not issubclass(kind, Exception):
        for coder in coders:
            coder.tell()


def _ours(symbol: str) -> Any:
    """Return ``module:name`` of this package. So what is off is not imported."""
    return resolve_name(f"{__name__}.{symbol}")


def _runtime(symbol: str) -> Any:
    """Return ``module:name`` of `megatron.fold3d.runtime`."""
    return resolve_name(f"megatron.fold3d.runtime.{symbol}")


class _Run:
    """What several features of a run share; what is off is None, and not imported."""

    def __init__(self, config: "Fold3DConfig", plans: "Plans", num_local: int) -> None:
        self.config, self.plans, self.num_local = config, plans, num_local
        self.communicator = self.baton = self.side = None
        self.tracer = self.delta = self.sums = None
        self.recorder = _runtime("events:UNHEARD")
        if config.preemptive_comm:
            self.communicator = _runtime("preemption.communicator:PreemptiveCommunicator")(
                slice_bytes=config.slice_bytes,
                timeout=timedelta(minutes=config.distributed_timeout_minutes),
                fits_slices=config.choice.slice_bytes is None,
            )
        if config.choice.pairs:
            self.baton = _runtime("tensor_parallel.baton:Baton")()
            self.side = self.baton.side  # tells which of a pair a thread is
        if config.delta_param_gather != "off" and _has_coder(config):
            measures = config.delta_param_gather == "auto"
            self.delta = _runtime("grad_sync.delta_gather:DeltaGather")(measures=measures)
        if config.coded_grad_reduce != "off" and _has_coder(config):
            measures = config.coded_grad_reduce == "auto"
            self.sums = _runtime("grad_sync.coded_sums:CodedSums")(
                measures=measures, num_chunks=config.num_segments
            )
        if config.trace is not None:
            self.tracer = _runtime("trace.tracer:Tracer")(config, _metrics())
            self.recorder = self.tracer.recorder


def _has_coder(config: "Fold3DConfig") -> bool:
    """Tell whether the code's library is built; without it ``on`` is refused."""
    from megatron.fold3d.config.gpu_settings import DELTA_LIBRARIES

    return DELTA_LIBRARIES[config.device].exists()


def _parts(run: _Run) -> "Iterator[Part]":
    """Yield what a run adds to the executor; what is off is not made, and not imported."""
    c = run.config  # the outermost feature comes first
    if run.communicator is not None:
        yield run.communicator
    if run.baton is not None:
        yield run.baton
        yield _ours("schedule.tensor_parallel_group:patch")(run.baton, run.recorder)
        yield from _ours("schedule.paired_layers:patches")(run.baton)
    if c.num_ranks > 1:
        yield _transfers(run)
    if run.tracer is not None:
        yield run.tracer
    if c.job.shards != "off":
        yield _runtime("shard_buffers:ShardBuffers")("param_data")
    yield from _dp_sync(run)
    if c.job.shards == "gradients":
        yield _runtime("shard_buffers:ShardBuffers")("grad_data")
    if c.apart or "wgrad" in c.auto:
        if c.has_engine_modules:
            yield (engine := _runtime("weight_grads.engine_modules:EngineWeightGrads")())
            yield _ours("schedule.backward_post_hook:patch")(engine)
        else:
            yield (own := _runtime("weight_grads.delayed_linear:DelayedWeightGrads")(run.side))
            yield _ours("schedule.linear:patch")(own)
    if c.auto_recompute_layers:
        yield _runtime("measured_counts:MeasuredCounts")(c.activation_memory_bytes)
    elif c.recompute_layers is not None:
        yield _runtime("recompute_counts:RecomputeCounts")(c.recompute_layers)
    if c.early_stages:
        yield (early := _runtime("early_recompute:EarlyRecompute")())
        yield _ours("schedule.checkpoint:patch")(early)
    if c.offload_activations != "off":
        offloader = _runtime("offload.offloader:Offloader")
        yield (made := offloader(c, run.plans, run.recorder, run.num_local))
        yield _ours("schedule.checkpoint:patch")(made)
    if c.cuts_every_segment:
        yield from _ours("schedule.gradient_buckets:PATCHES")
    if c.job.steps_shards:
        yield from _ours("schedule.embedding_grads:PATCHES")


def _transfers(run: _Run) -> "Feature":
    links = "alternating_p2p:AlternatingP2P" if run.config.job.receives_late else "p2p:P2P"
    connects = [_runtime(f"transfers.{links}")]
    if run.communicator is not None:
        preemptive = _runtime("preemption.preemptive_p2p:PreemptiveP2P")
        connects = [partial(preemptive, run.communicator)]
    if run.config.lazy_inter_segment:
        connects.append(_runtime("transfers.host_link:HostLink"))
    made: Feature = _runtime("transfers.pipeline_transfers:PipelineTransfers")(
        connects, run.recorder
    )
    return made


def _dp_sync(run: _Run) -> "Iterator[Part]":
    """Yield DP.sync, and around it what owns steps and groups, and what chooses, if any does."""
    config = run.config
    due = replicated = auto = None
    # The innermost first.
    features: list[Feature] = [_runtime("grad_sync.dp_sync:DPSync")(run.recorder, run.side)]
    if config.choice.carries or "step" in config.auto:
        started_by = None if config.choice.order == "auto" else run.communicator
        due = _runtime("grad_sync.due_steps:DueSteps")(config, started_by, run.recorder)
        features.append(due)
    elif config.choice.where(optimizer="replicated") or "optimizer" in config.auto:
        replicated = _runtime("grad_sync.other_shards:ReplicatedSegments")()
        features.append(replicated)
    has_one_queue = config.job.receives_late and config.job.grad_sync == "overlap"
    if due is None and has_one_queue and config.num_segments > 1:
        features.append(_runtime("grad_sync.second_lane:SecondLane")())
    if config.measuring_flag:
        from megatron.fold3d.training.search_process import SearchProcess

        auto = _runtime("auto_schedule:AutoSchedule")(
            config, SearchProcess, due=due, delta=run.delta, sums=run.sums
        )
        features.append(auto)
    yield from reversed(features)
    if due or replicated or auto:
        yield _ours("schedule.optimizer_step:patch")(due, _metrics(), replicated, auto)
        yield from _ours("schedule.due_steps:patches")(due) if due else ()


def _metrics() -> Any:
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    return _runtime("trace.metrics:Metrics")(get_tensorboard_writer, get_wandb_writer)


def _traced(run: _Run) -> Iterator[Patch]:
    """Yield what a trace of a run needs beside the features that tell its recorder."""
    yield from _ours("trace.spans:iteration")(run.tracer)
    yield from _ours("trace.collectives:patches")(run.tracer)
    yield from _ours("trace.spans:updates")(run.tracer)
    if run.config.choice.order == "stock":  # our executor records its own computations
        yield from _ours("trace.spans:computations")(run.tracer)
    if run.config.records_tp_sync and run.baton is None:  # pairs have it
        yield _ours("schedule.tensor_parallel_group:patch")(recorder=run.recorder)


def _marks(config: "Fold3DConfig") -> Sequence[Patch]:
    if not config.traffic_class:
        return ()

    from fold3d_patches.schedule import nccl_options

    nccl_options.check_traffic_classes()
    return (nccl_options.patch(config.traffic_class.get("pp"), config.traffic_class.get("dp")),)
