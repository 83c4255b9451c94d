"""How a runtime executes a plan: what waits for what, and who goes first on a shared link."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megatron.fold3d.plan.device_queues import MOST_OUTSTANDING
from megatron.fold3d.plan.ir import Action, Op
from megatron.fold3d.predict.simulator.routes import NO_SWITCHES, Routes

GradSyncOrder = Literal["fifo", "edf"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """GPUs that run a plan by the rules of `megatron.fold3d.plan.device_queues`."""

    connections: int
    """Hardware queues that the streams of a rank share: ``CUDA_DEVICE_MAX_CONNECTIONS``."""
    launches: tuple[int, ...] = ()
    """Per stage, the number of collectives that its DP.sync is cut into; empty means one each."""
    in_backward: bool = False
    """Whether DDP's hooks launch them inside the stage's last backward.

    They cut the backward into equal parts, and one is launched behind each. Where DP.sync is
    deferred, or the backward is without its weight gradients, REDUCE_GRAD launches all.
    """
    most_outstanding: int | None = MOST_OUTSTANDING
    """Outstanding NCCL operations at which the host waits; None is no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """The rules of execution, which a simulation needs beside a plan and its costs."""

    nic_of_rank: tuple[int, ...] | None = None
    """The NIC that each rank uses; None gives every rank its own."""
    routes: Routes = NO_SWITCHES
    """The links between switches that messages and DP.sync take."""
    grad_sync_order: GradSyncOrder = "fifo"
    """With "edf" (earliest deadline first), DP.sync that is needed earlier overtakes the others."""
    preemptive: bool = True
    """Whether PP.sync goes before DP.sync on a shared link; otherwise they share it fairly."""
    pause_share: float = 1.0
    """With ``preemptive``, the part of each second for which PP.sync may keep DP.sync waiting."""
    flush: bool = False
    """Whether no rank begins an iteration before all ranks have ended the previous one."""
    in_order: bool = False
    """Whether messages from one rank to another go one after the other, as in one communicator.

    Otherwise they share the link.
    """
    needed_s: Mapping[Action, float] | None = None
    """When a message is needed, by the forward or backward that reads it.

    Of messages that share a link, the one that is needed first takes it; no runtime does that.
    Without it they share the link fairly.
    """
    whole_messages: bool = False
    """With ``needed_s``, whether a message that has begun makes way for no other."""
    sends_waited_for: frozenset[Op] = frozenset()
    """The computations (FORWARD, BACKWARD) after which a rank waits until the result has arrived.

    Where sends are buffered, it waits for the buffer only.
    """
    backward_share: tuple[float, ...] = ()
    """Per stage, the part of DP.sync that its REDUCE_GRAD starts (paper Algorithm 2).

    The rest of all stages follows the last action. Without shares, REDUCE_GRAD starts everything.
    """
    overlap_tensor_parallel: bool = False
    """Whether neighbouring micro-batches are computed in pairs: see `plan.passes.pairs`."""
    device: Device | None = None
    """What runs the plan.

    Without it every stream has a queue of its own, every receive is posted in time, and a launch
    costs nothing. With it, messages of a direction go one after the other (``in_order`` or not) and
    DP.sync in the order of its launch (whatever ``grad_sync_order`` is).
    """


PLAIN = Execution()


def sends_stock_waits_for(num_segments: int) -> frozenset[Op]:
    """Return the computations after which stock Megatron waits for the transfer of the result.

    It waits after a forward, because it frees the output tensor; without virtual stages it waits
    after a backward as well.
    """
    return frozenset({Op.FORWARD} if num_segments > 1 else {Op.FORWARD, Op.BACKWARD})
