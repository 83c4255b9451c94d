"""Binds fold3d to Megatron: the ordered lists of patches, and nothing else."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from fold3d_patches.registry import Patch, PatchError, apply

if TYPE_CHECKING:
    from megatron.fold3d.config.fold3d_config import Fold3DConfig
    from megatron.fold3d.runtime.feature import Feature
    from megatron.fold3d.runtime.grad_sync.measured_shares import AutoShares
    from megatron.fold3d.runtime.plans import Plans
    from megatron.fold3d.runtime.preemption.communicator import PreemptiveCommunicator
    from megatron.fold3d.runtime.trace.metrics import Metrics
    from megatron.fold3d.runtime.trace.recorder import Recorder

    Part = tuple[Sequence[Feature], Sequence[Patch]]  # what one capability adds to a run

__all__ = ["Patch", "PatchError", "install_platform", "install_schedule"]


def install_platform(device: str) -> ExitStack:
    """Patch what Megatron needs before it validates its flags; closing the stack restores it.

    Raises:
        PatchError: the installed Megatron is not the one the patches were written for.
    """
    from fold3d_patches import compile_helpers, cpu

    return apply([compile_helpers.patch(), *(cpu.patches() if device == "cpu" else ())])


def install_schedule(
    config: "Fold3DConfig", num_microbatches: int, ranks_here: Sequence[int] = ()
) -> ExitStack:
    """Make Megatron train under the schedule of ``config``; closing the stack restores it.

    Args:
        config: of the run.
        num_microbatches: of an iteration.
        ranks_here: the pipeline ranks of this node's processes.

    Raises:
        PatchError: as above.
        PlanError: the schedule cannot run ``num_microbatches``, or the user's plan is for others.
        HostMemoryError: this node has not the memory for what ``config`` offloads to it.
    """
    from megatron.fold3d.runtime.plans import Plans

    plans = Plans(config)
    if config.schedule != "stock":
        plan = plans.training(num_microbatches)
        if config.offload_activations == "on":
            from megatron.fold3d.runtime.offload import host_memory

            host_memory.check_node(plan, config.saved_bytes, ranks_here)
    num_local = max(1, len(ranks_here))
    if config.trace is None:
        return _install(config, plans, None, num_local)

    from fold3d_patches import trace
    from megatron.fold3d.runtime.trace.tracer import Tracer

    tracer = Tracer(config, plans, _metrics())
    with apply(trace.patches(tracer, config.schedule)) as stack:
        stack.enter_context(tracer)
        stack.push(_install(config, plans, tracer.recorder, num_local))
        return stack.pop_all()


def _install(
    config: "Fold3DConfig", plans: "Plans", recorder: "Recorder | None", num_local: int
) -> ExitStack:
    marks = _marks(config)
    if config.schedule == "stock":
        return apply(marks)

    from fold3d_patches.schedule import get_forward_backward_func
    from megatron.fold3d.runtime.executor import Executor

    communicator = _communicator(config)
    # The outermost first: what is off is not here, and is not imported.
    features, patches = _joined(
        _preemption(config, communicator),
        _transfers(config, communicator, recorder),
        _recorded_actions(recorder),
        _grad_sync(config, communicator, recorder),
        _weight_grads(config),
        _recompute(config),
        _offload(config, plans, recorder, num_local),
    )
    executor = Executor(plans, features)
    if config.cuts_every_segment:
        from fold3d_patches.schedule import gradient_buckets

        patches += gradient_buckets.patches()
    stack = apply([get_forward_backward_func.patch(executor), *marks, *patches])
    stack.push(executor)
    return stack


def _joined(*parts: "Part") -> "tuple[list[Feature], list[Patch]]":
    features = [feature for features, _ in parts for feature in features]
    return features, [patch for _, patches in parts for patch in patches]


def _communicator(config: "Fold3DConfig") -> "PreemptiveCommunicator | None":
    if not config.preemptive_comm:
        return None

    from megatron.fold3d.runtime.preemption.communicator import PreemptiveCommunicator

    return PreemptiveCommunicator.of(config)


def _preemption(config: "Fold3DConfig", communicator: "PreemptiveCommunicator | None") -> "Part":
    if communicator is None:
        return (), ()

    from megatron.fold3d.runtime.preemption.preemption import Preemption

    return (Preemption(communicator, _timeout(config), config.dp_traffic_class),), ()


def _transfers(
    config: "Fold3DConfig",
    communicator: "PreemptiveCommunicator | None",
    recorder: "Recorder | None",
) -> "Part":
    if config.num_ranks == 1:
        return (), ()

    from megatron.fold3d.runtime.transfers.p2p import P2P
    from megatron.fold3d.runtime.transfers.pipeline_transfers import PipelineTransfers

    p2p: Callable[..., P2P] = P2P
    if recorder is not None:
        from megatron.fold3d.runtime.trace.recorded_actions import RecordedP2P

        p2p = partial(RecordedP2P, recorder)
    connect = partial(
        p2p,
        timeout=_timeout(config),
        lazy=config.lazy_inter_segment,
        communicator=communicator,
        traffic_class=config.pp_traffic_class,
    )
    return (PipelineTransfers(connect),), ()


def _recorded_actions(recorder: "Recorder | None") -> "Part":
    if recorder is None:
        return (), ()

    from megatron.fold3d.runtime.trace.recorded_actions import RecordedActions

    return (RecordedActions(recorder),), ()


def _grad_sync(
    config: "Fold3DConfig",
    communicator: "PreemptiveCommunicator | None",
    recorder: "Recorder | None",
) -> "Part":
    if config.backward_share is None:
        from megatron.fold3d.runtime.grad_sync.ddp_sync import GradSync

        return (GradSync(),), ()

    from fold3d_patches.schedule import (
        checkpoint_and_decide_exit,
        optimizer_step,
        save_checkpoint,
        scale_gradients,
        zero_grad_buffer,
    )
    from megatron.fold3d.runtime.grad_sync.deferred_grad_sync import DeferredGradSync
    from megatron.fold3d.runtime.grad_sync.deferred_sync import DeferredSync

    deferred = DeferredSync(
        config.backward_share,
        slice_bytes=config.dp_slice_bytes,
        bounded=config.clips_or_scales,
        timeout=_timeout(config),
        communicator=communicator,
        auto=_auto_shares(config),
        recorder=recorder,
        traffic_class=config.dp_traffic_class,
    )
    return (DeferredGradSync(deferred),), (
        checkpoint_and_decide_exit.patch(deferred),
        optimizer_step.patch(deferred, _metrics()),
        save_checkpoint.patch(deferred),
        scale_gradients.patch(deferred),
        zero_grad_buffer.patch(deferred),
    )


def _auto_shares(config: "Fold3DConfig") -> "AutoShares | None":
    if not config.auto_share:
        return None

    from megatron.fold3d.runtime.grad_sync.measured_shares import AutoShares

    return AutoShares(_timeout(config))


def _weight_grads(config: "Fold3DConfig") -> "Part":
    if not config.delay_weight_grads:
        return (), ()

    from fold3d_patches.schedule import linear
    from megatron.fold3d.runtime.weight_grads.delayed_linear import DelayedWeightGrads

    weight_grads = DelayedWeightGrads()
    return (weight_grads,), (linear.patch(weight_grads),)


def _recompute(config: "Fold3DConfig") -> "Part":
    if not config.recompute_early:
        return (), ()

    from fold3d_patches.schedule import checkpoint
    from megatron.fold3d.runtime.early_recompute import EarlyRecompute

    early = EarlyRecompute()
    return (early,), (checkpoint.patch(early=early),)


def _offload(
    config: "Fold3DConfig", plans: "Plans", recorder: "Recorder | None", num_local: int
) -> "Part":
    if config.offload_activations == "off":
        return (), ()

    from fold3d_patches.schedule import checkpoint
    from megatron.fold3d.runtime.offload.offload_actions import Offload
    from megatron.fold3d.runtime.offload.offloader import Offloader

    offloader = Offloader.of(config, num_local)
    return (Offload(offloader, plans, recorder),), (checkpoint.patch(offloader),)


def _timeout(config: "Fold3DConfig") -> timedelta:
    return timedelta(minutes=config.distributed_timeout_minutes)


def _metrics() -> "Metrics":
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    from megatron.fold3d.runtime.trace.metrics import Metrics

    return Metrics(get_tensorboard_writer, get_wandb_writer)


def _marks(config: "Fold3DConfig") -> Sequence[Patch]:
    if config.pp_traffic_class is None and config.dp_traffic_class is None:
        return ()

    from fold3d_patches.schedule import nccl_options
    from megatron.fold3d.runtime.transfers import nccl

    nccl.check_traffic_classes()
    return (nccl_options.patch(config.pp_traffic_class, config.dp_traffic_class),)
