"""Binds fold3d to Megatron: chooses a run's features and patches from its configuration."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from fold3d_patches.registry import Patch, apply
from megatron.fold3d.upstream import versions

if TYPE_CHECKING:
    from megatron.fold3d.config.fold3d_config import Fold3DConfig
    from megatron.fold3d.plan.ir import Plan
    from megatron.fold3d.runtime.events import Events
    from megatron.fold3d.runtime.feature import Feature
    from megatron.fold3d.runtime.grad_sync.coded_sums import CodedSums
    from megatron.fold3d.runtime.grad_sync.delta_gather import DeltaGather
    from megatron.fold3d.runtime.plans import Plans
    from megatron.fold3d.runtime.preemption.communicator import PreemptiveCommunicator
    from megatron.fold3d.runtime.tensor_parallel.baton import Baton
    from megatron.fold3d.runtime.trace.metrics import Metrics
    from megatron.fold3d.runtime.trace.tracer import Tracer
    from megatron.fold3d.runtime.transfers.pipeline_transfers import Connect

    Part = Feature | Patch  # of what a capability adds to a run


def install_platform(device: str) -> ExitStack:
    """Install the patches that Megatron's validation of flags needs; closing the stack undoes them.

    Raises:
        PatchError: the installed Megatron is not the one the patches were written for.
    """
    from fold3d_patches import compile_helpers, cpu, many_queues, parsed_once, unfused_layers
    from megatron.fold3d.config.gpu_settings import has_fusion_kernel, has_many_queues

    patches = [compile_helpers.patch()]
    if versions.pretrain_parses_flags():
        patches += parsed_once.patches()
    if device == "cpu":
        patches += cpu.patches()
    else:
        patches += () if has_fusion_kernel() else unfused_layers.patches()
        patches += (many_queues.patch(),) if has_many_queues() else ()
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
        from fold3d_patches import delta_gather

        patches += delta_gather.patches(run.delta)
    if run.sums is not None:
        from fold3d_patches import coded_sums

        patches += coded_sums.patches(run.sums)
    if run.tracer is not None:
        from fold3d_patches import trace

        patches += trace.patches(run.tracer, config)
    if config.choice.order != "stock":
        from fold3d_patches.schedule import get_forward_backward_func, script_settings
        from megatron.fold3d.runtime.executor import Executor

        parts = [*_parts(run)]
        executor = Executor(plans, [part for part in parts if not isinstance(part, Patch)])
        patches += [get_forward_backward_func.patch(executor), *script_settings.patches()]
        patches += [part for part in parts if isinstance(part, Patch)]
        if versions.sums_are_awaited_once():
            from fold3d_patches.schedule import finished_sums

            patches += finished_sums.patches()
    with apply(patches) as stack:
        if executor is not None:
            stack.push(executor)
        elif run.tracer is not None:
            stack.enter_context(run.tracer)
        for coder in (run.delta, run.sums):
            if coder is not None:
                stack.push(coder.tell)
        return stack.pop_all()


class _Run:
    """What several features of a run share; what is off is None, and not imported."""

    communicator: "PreemptiveCommunicator | None" = None
    baton: "Baton | None" = None
    side: "Callable[[], int] | None" = None  # tells which of a pair a thread is
    tracer: "Tracer | None" = None
    delta: "DeltaGather | None" = None
    sums: "CodedSums | None" = None

    def __init__(self, config: "Fold3DConfig", plans: "Plans", num_local: int) -> None:
        from megatron.fold3d.runtime.events import UNHEARD

        self.config, self.plans, self.num_local = config, plans, num_local
        self.recorder: Events = UNHEARD
        if config.preemptive_comm:
            from megatron.fold3d.runtime.preemption.communicator import PreemptiveCommunicator

            self.communicator = PreemptiveCommunicator(
                slice_bytes=config.slice_bytes,
                timeout=timedelta(minutes=config.distributed_timeout_minutes),
                fits_slices=config.choice.slice_bytes is None,
            )
        if config.choice.pairs:
            from megatron.fold3d.runtime.tensor_parallel.baton import Baton

            self.baton = Baton()
            self.side = self.baton.side
        if config.delta_param_gather != "off" and _has_coder(config):
            from megatron.fold3d.runtime.grad_sync.delta_gather import DeltaGather

            self.delta = DeltaGather(measures=config.delta_param_gather == "auto")
        if config.coded_grad_reduce != "off" and _has_coder(config):
            from megatron.fold3d.runtime.grad_sync.coded_sums import CodedSums

            self.sums = CodedSums(measures=config.coded_grad_reduce == "auto")
        if config.trace is not None:
            from megatron.fold3d.runtime.trace.tracer import Tracer

            self.tracer = Tracer(config, _metrics())
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
        from fold3d_patches.schedule import paired_layers, tensor_parallel_group

        yield from _made("tensor_parallel.paired_microbatches:PairedMicrobatches", run.baton)
        yield tensor_parallel_group.patch(run.baton, run.recorder)
        yield from paired_layers.patches(run.baton)
    if c.num_ranks > 1:
        yield _transfers(run)
    if run.tracer is not None:
        yield run.tracer
    if c.job.shards != "off":
        yield from _made("shard_buffers:ShardBuffers", "param_data")
    yield from _dp_sync(run)
    if c.job.shards == "gradients":
        yield from _made("shard_buffers:ShardBuffers", "grad_data")
    if c.apart or "wgrad" in c.auto:
        if c.has_engine_modules:
            engine = "weight_grads.engine_modules:EngineWeightGrads"
            yield from _made(engine, patch="backward_post_hook")
        else:
            yield from _made(
                "weight_grads.delayed_linear:DelayedWeightGrads", run.side, patch="linear"
            )
    if c.auto_recompute_layers:
        yield from _made("measured_counts:MeasuredCounts", c.activation_memory_bytes)
    elif c.recompute_layers is not None:
        yield from _made("recompute_counts:RecomputeCounts", c.recompute_layers)
    if c.early_stages:
        yield from _made("early_recompute:EarlyRecompute", patch="checkpoint")
    if c.offload_activations != "off":
        args = (c, run.plans, run.recorder, run.num_local)
        yield from _made("offload.offloader:Offloader", *args, patch="checkpoint")
    if c.cuts_every_segment:
        from fold3d_patches.schedule import gradient_buckets

        yield from gradient_buckets.patches()
    if c.job.steps_shards:
        from fold3d_patches.schedule import embedding_grads

        yield embedding_grads.patch()


def _made(feature: str, *args: object, patch: str = "") -> "Iterator[Part]":
    """Make a feature, and its patch if it has one.

    Args:
        feature: ``module:Class`` of `megatron.fold3d.runtime`.
        patch: a module of `fold3d_patches.schedule` whose patch takes the feature.
    """
    module, name = feature.split(":")
    made = getattr(import_module(f"megatron.fold3d.runtime.{module}"), name)(*args)
    yield made
    if patch:
        yield import_module(f"fold3d_patches.schedule.{patch}").patch(made)


def _transfers(run: _Run) -> "Feature":
    from megatron.fold3d.runtime.transfers.p2p import P2P
    from megatron.fold3d.runtime.transfers.pipeline_transfers import PipelineTransfers

    connects: list[Connect] = [P2P]
    if run.config.job.receives_late:
        from megatron.fold3d.runtime.transfers.alternating_p2p import AlternatingP2P

        connects = [AlternatingP2P]
    if run.communicator is not None:
        from megatron.fold3d.runtime.preemption.preemptive_p2p import PreemptiveP2P

        connects = [partial(PreemptiveP2P, run.communicator)]
    if run.config.lazy_inter_segment:
        from megatron.fold3d.runtime.transfers.host_link import HostLink

        connects.append(HostLink)
    return PipelineTransfers(connects, run.recorder)


def _dp_sync(run: _Run) -> "Iterator[Part]":
    """Yield DP.sync, and around it what owns steps and groups, and what chooses, if any does."""
    from megatron.fold3d.runtime.grad_sync.dp_sync import DPSync

    config = run.config
    due = replicated = auto = None
    features: list[Feature] = [DPSync(run.recorder, run.side)]  # the innermost first
    if config.choice.carries or "step" in config.auto:
        from megatron.fold3d.runtime.grad_sync.due_steps import DueSteps

        started_by = None if config.choice.order == "auto" else run.communicator
        due = DueSteps(config, started_by, run.recorder)
        features.append(due)
    elif config.choice.where(optimizer="replicated") or "optimizer" in config.auto:
        from megatron.fold3d.runtime.grad_sync.other_shards import ReplicatedSegments

        replicated = ReplicatedSegments()
        features.append(replicated)
    has_one_queue = config.job.receives_late and config.job.grad_sync == "overlap"
    if due is None and has_one_queue and config.num_segments > 1:
        from megatron.fold3d.runtime.grad_sync.second_lane import SecondLane

        features.append(SecondLane())
    if config.measuring_flag:
        from megatron.fold3d.runtime.auto_schedule import AutoSchedule
        from megatron.fold3d.training.search_process import SearchProcess

        auto = AutoSchedule(config, SearchProcess, due=due, delta=run.delta, sums=run.sums)
        features.append(auto)
    yield from reversed(features)
    if due or replicated or auto:
        from fold3d_patches.schedule import due_steps, optimizer_step

        yield optimizer_step.patch(due, _metrics(), replicated, auto)
        yield from due_steps.patches(due) if due else ()


def _metrics() -> "Metrics":
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    from megatron.fold3d.runtime.trace.metrics import Metrics

    return Metrics(get_tensorboard_writer, get_wandb_writer)


def _marks(config: "Fold3DConfig") -> Sequence[Patch]:
    if not config.traffic_class:
        return ()

    from fold3d_patches.schedule import nccl_options

    nccl_options.check_traffic_classes()
    return (nccl_options.patch(config.traffic_class.get("pp"), config.traffic_class.get("dp")),)
