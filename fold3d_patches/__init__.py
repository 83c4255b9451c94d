"""Binds fold3d to Megatron: the ordered lists of patches, and nothing else."""

from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING

from fold3d_patches.registry import Patch, PatchError, apply

if TYPE_CHECKING:
    from megatron.fold3d.config.fold3d_config import Fold3DConfig
    from megatron.fold3d.runtime.plans import Plans
    from megatron.fold3d.runtime.trace.recorder import Recorder

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
    from megatron.fold3d.runtime.offload import host_memory
    from megatron.fold3d.runtime.plans import Plans

    plans = Plans(config)
    if config.schedule != "stock":
        plan = plans.training(num_microbatches)
        if config.offload_activations == "on":
            host_memory.check_node(plan, config.saved_bytes, ranks_here)
    num_local = max(1, len(ranks_here))
    if config.trace is None:
        return _install(config, plans, None, num_local)

    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    from fold3d_patches import trace
    from megatron.fold3d.runtime.trace.metrics import Metrics
    from megatron.fold3d.runtime.trace.tracer import Tracer

    tracer = Tracer(config, plans, Metrics(get_tensorboard_writer, get_wandb_writer))
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

    from fold3d_patches.schedule import (
        checkpoint,
        get_forward_backward_func,
        gradient_buckets,
        linear,
        optimizer_step,
        save_checkpoint,
        scale_gradients,
        zero_grad_buffer,
    )
    from megatron.fold3d.runtime.early_recompute import EarlyRecompute
    from megatron.fold3d.runtime.executor import Executor
    from megatron.fold3d.runtime.grad_sync.deferred_sync import DeferredSync
    from megatron.fold3d.runtime.grad_sync.measured_shares import AutoShares
    from megatron.fold3d.runtime.offload.offloader import Offloader
    from megatron.fold3d.runtime.preemption.communicator import PreemptiveCommunicator
    from megatron.fold3d.runtime.weight_grads.delayed_linear import DelayedWeightGrads

    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    offloader = None if config.offload_activations == "off" else Offloader.of(config, num_local)
    communicator = PreemptiveCommunicator.of(config) if config.preemptive_comm else None
    weight_grads = DelayedWeightGrads() if config.delay_weight_grads else None
    early = EarlyRecompute() if config.recompute_early else None
    deferred = None
    if config.backward_share is not None:
        deferred = DeferredSync(
            config.backward_share,
            slice_bytes=config.dp_slice_bytes,
            bounded=config.clips_or_scales,
            timeout=timeout,
            communicator=communicator,
            auto=AutoShares(timeout) if config.auto_share else None,
            recorder=recorder,
            traffic_class=config.dp_traffic_class,
        )
    executor = Executor(
        config, plans, deferred, recorder, offloader, communicator, weight_grads, early
    )
    patches = [get_forward_backward_func.patch(executor), *marks]
    if deferred is not None:
        patches += [
            optimizer_step.patch(deferred),
            save_checkpoint.patch(deferred),
            scale_gradients.patch(deferred),
            zero_grad_buffer.patch(deferred),
        ]
    if offloader is not None or early is not None:
        patches.append(checkpoint.patch(offloader, early))
    if weight_grads is not None:
        patches.append(linear.patch(weight_grads))
    if config.cuts_every_segment:
        patches += gradient_buckets.patches()
    stack = apply(patches)
    stack.push(executor)
    if communicator is not None:
        stack.push(communicator)
    if deferred is not None:
        stack.push(deferred)  # it still communicates when it closes
    return stack


def _marks(config: "Fold3DConfig") -> Sequence[Patch]:
    if config.pp_traffic_class is None and config.dp_traffic_class is None:
        return ()

    from fold3d_patches.schedule import nccl_options
    from megatron.fold3d.runtime.transfers import nccl

    nccl.check_traffic_classes()
    return (nccl_options.patch(config.pp_traffic_class, config.dp_traffic_class),)
