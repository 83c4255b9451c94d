"""The options that say when DP.sync runs and on which queues; simulates a plan with them."""

from argparse import Namespace

from megatron.fold3d.commands.cost_options import Source
from megatron.fold3d.observe.timeline import Timeline
from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.plan.schedule_word import AUTO, Part
from megatron.fold3d.predict.search.candidate_timeline import PAUSE_SHARE
from megatron.fold3d.predict.search.simulated_shares import auto_shares, with_shares
from megatron.fold3d.predict.simulator.execution import (
    Device,
    Execution,
    sends_stock_waits_for,
)
from megatron.fold3d.predict.simulator.simulate import simulate
from megatron.fold3d.predict.simulator.steady import steady_state

_MOST_LAUNCHES = 10_000


def grad_sync_of(args: Namespace) -> str | None:
    """Return where DP.sync goes, or None if the options do not say.

    Raises:
        ValueError: they say it twice, or give no share.
    """
    share = args.backward_share
    if args.is_stock and args.grad_sync == "deferred":
        raise ValueError(
            "--grad-sync deferred with --schedule stock: only a schedule of ours defers; drop one"
        )
    if share is None:
        return str(args.grad_sync) if args.grad_sync else None
    if share != AUTO and not 0 <= share <= 1:
        raise ValueError(f"share={share}: it is a share of DP.sync, from 0 to 1")
    if args.grad_sync is not None:
        raise ValueError(
            f"step=next with --grad-sync {args.grad_sync}: it has its own order; drop one"
        )
    return "deferred"


def reduces_early(args: Namespace, source: Source, grad_sync: str | None) -> bool:
    """Tell whether training would start DP.sync between delayed weight gradients."""
    one_queue = 1 in (args.cuda_connections, source.cuda_connections)
    waits = args.preemptive_comm or args.overlap_tensor_parallel
    return not (
        args.is_stock
        or one_queue
        or waits
        or args.shard_segments is not None
        or grad_sync == "serial"
        or is_sliced(args, source)
    )


def check_behind(args: Namespace, source: Source, *, may: bool) -> None:
    """Check that weight gradients can be behind the backwards of their segments.

    Args:
        args: the command's arguments.
        source: the source of the costs.
        may: whether DP.sync may start early.

    Raises:
        ValueError: they cannot; found, rule and fix.
    """
    if not args.behind_backwards or args.delay_weight_grads == AUTO:
        return
    found = str(Part("wgrad", "behind", args.behind_backwards))
    defers = args.backward_share is not None
    if defers and source.gathers_params:
        raise ValueError(
            f"{found} with step=next and parameters that are gathered: what is deferred is cut "
            "shard by shard, not parameter by parameter; give last, or drop one of the others"
        )
    if not may:
        raise ValueError(
            f"{found}: it starts DP.sync as soon as gradients are complete; give last, or drop "
            "what starts it elsewhere: slices, one hardware queue, pairs, shards or "
            "--preemptive-comm"
        )


def is_sliced(args: Namespace, source: Source) -> bool:
    """Tell whether DP.sync is cut into slices: if asked to, or where training would."""
    if args.dp_slices != AUTO or args.grad_sync_launches is not None or source.hardware is None:
        return bool(args.dp_slices == "on")
    return args.cuda_connections == 1 and args.backward_share is not None


def slice_shares(args: Namespace, plan: Plan, source: Source) -> tuple[float, ...]:
    """Return the share of each stage's slices behind the backwards."""
    # Slices hold up nothing, so they are chosen as if nothing could.
    execution = Execution(nic_of_rank=source.nic_of_rank, routes=source.routes, in_order=True)
    return _shares(args, plan, source, execution)


def _shares(args: Namespace, plan: Plan, source: Source, execution: Execution) -> tuple[float, ...]:
    if args.backward_share == AUTO:
        return auto_shares(plan, source.costs, execution)
    return (1.0 if args.backward_share is None else args.backward_share,) * plan.num_stages


def check_device_options(args: Namespace, grad_sync: str | None) -> None:
    """Refuse options that GPUs with shared queues do not support.

    Raises:
        ValueError: found, rule and fix.
    """
    connections, launches = args.cuda_connections, args.grad_sync_launches
    if args.dp_slices == "on" and launches is not None:
        raise ValueError(
            f"slices=on with --grad-sync-launches {launches}: a slice is one collective; drop one"
        )
    if args.dp_slices == "on" and grad_sync is not None and args.backward_share is None:
        raise ValueError(
            f"slices=on with --grad-sync {grad_sync}: slices follow each other in the plan's "
            "order; drop one, or give step=next"
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
            "order of its launch, not the most urgent first; give step=next"
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
    if args.is_stock:
        return Device(connections=args.cuda_connections)
    if args.grad_sync_launches is not None:
        launches = (args.grad_sync_launches,) * plan.num_stages
    elif is_sliced(args, source):  # a slice is one collective
        launches = ()
    else:
        deferred = args.backward_share is not None
        launches = source.launches(deferred=deferred, connections=args.cuda_connections)
    return Device(
        connections=args.cuda_connections,
        launches=launches,
        in_backward=args.grad_sync != "serial",
    )


def simulated_timeline(args: Namespace, plan: Plan, source: Source) -> tuple[Plan, Timeline]:
    """Return a lowered plan with its shares of DP.sync, and its timeline."""
    execution = Execution(
        device=_device(args, plan, source),
        nic_of_rank=source.nic_of_rank,
        routes=source.routes,
        preemptive=args.preemptive_comm,
        pause_share=PAUSE_SHARE,
        grad_sync_order="edf" if args.grad_sync == "deferred" else "fifo",
        in_order=True,
        sends_waited_for=sends_stock_waits_for(plan.num_segments) if args.is_stock else frozenset(),
        overlap_tensor_parallel=bool(args.overlap_tensor_parallel),
        shard_shares=() if source.hardware is None else source.hardware.shard_shares,
    )
    if args.backward_share is not None and not is_sliced(args, source):
        plan = with_shares(plan, source.costs, _shares(args, plan, source, execution))
    if args.iterations is None and not plan.flushes:
        return plan, steady_state(plan, source.costs, execution)
    return plan, simulate(plan, source.costs, execution, iterations=args.iterations or 1)
