"""The links of a plan that runs, and how it shares them: what waits, and what goes first."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from megatron.fold3d.plan.device_queues import MOST_OUTSTANDING
from megatron.fold3d.plan.ir import Op
from megatron.fold3d.plan.ops import WAYS

GradSyncOrder = Literal["fifo", "edf"]


class Use(NamedTuple):
    """A link between switches that a flow takes."""

    link: int
    flows: int
    """How many flows that are equal to this one share the link."""


@dataclass(frozen=True, slots=True)
class Routes:
    """The links between switches that flows use; none if no link is scarcer than a NIC.

    A simulated rank represents all nodes that hold the same part of the model. These nodes send the
    same amounts through the same switches, or through other switches with the same load. So a link
    here represents all links with the same load.
    """

    capacities: tuple[float, ...] = ()
    """Bandwidth of each link in one direction, relative to the NICs of a node."""
    of_flow: Mapping[tuple[int, int], tuple[Use, ...]] = field(default_factory=dict)
    """The links by sending and receiving pipeline rank; the same one twice is its DP.sync."""

    def of(self, sender: int, receiver: int) -> tuple[Use, ...]:
        """Return the links of a message from rank to rank, or of a rank's DP.sync."""
        return self.of_flow.get((sender, receiver), ())


NO_SWITCHES = Routes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """GPUs that run a plan by the rules of `megatron.fold3d.plan.device_queues`."""

    connections: int
    """Hardware queues that the streams of a rank share: ``CUDA_DEVICE_MAX_CONNECTIONS``."""
    launches: tuple[int, ...] = ()
    """By stage, the number of collectives of its DP.sync; empty means one for each stage."""
    in_backward: bool = False
    """Whether DDP's hooks launch them inside the stage's last backward: see `plan.ir.hooked`.

    They cut the backward into equal parts and launch one after each.
    """
    most_outstanding: int | None = MOST_OUTSTANDING
    """Outstanding NCCL operations at which the host waits; None is no limit."""
    tensor_parallel: bool = False
    """Whether a collective, which takes no time here, cuts each forward and backward in two.

    How long it takes is part of the computation; that it is there may let a plan not end.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What a simulation needs in addition to a plan and its costs."""

    nic_of_rank: tuple[int, ...] | None = None
    """The NIC that each rank uses; None gives every rank its own."""
    routes: Routes = NO_SWITCHES
    """The links between switches that messages and DP.sync take."""
    grad_sync_order: GradSyncOrder = "fifo"
    """With "edf" (earliest deadline first), more urgent DP.sync overtakes the others."""
    preemptive: bool = True
    """Whether PP.sync goes before DP.sync on a shared link; otherwise they share it fairly."""
    pause_share: float = 1.0
    """With ``preemptive``, the share of time for which PP.sync may keep DP.sync waiting."""
    sends_waited_for: frozenset[Op] = frozenset()
    """The computations (FORWARD, BACKWARD) after which a rank waits until the result has arrived.

    If sends are buffered, the rank waits only until the buffer has taken the message.
    """
    shard_shares: tuple[tuple[float, float], ...] = ()
    """Where reductions to shards start between weight gradients: `policy.shard_order`.

    Pairs of a share of the work and the share of the reduction that has started then. If empty, the
    two are equal.
    """
    overlap_tensor_parallel: bool = False
    """Whether neighbouring micro-batches are computed in pairs: see `plan.passes.pairs`.

    A plan of several ranks has its transfers then.
    """
    combined: bool = False
    """Whether forwards run as one with backwards: see `plan.passes.combined`."""
    contended: bool = True
    """Whether messages share links; otherwise each takes the seconds of its costs."""
    device: Device | None = None
    """The GPUs that run the plan.

    With None, every stream has its own queue, every receive is posted in time, and launches cost
    nothing. Otherwise DP.sync goes in the order of its launch; ``grad_sync_order`` is ignored.
    """


PLAIN = Link()


def sends_stock_waits_for(num_segments: int) -> frozenset[Op]:
    """Return the computations after which stock Megatron waits for the transfer of the result.

    It waits after a forward, because it frees the output tensor; without virtual stages it waits
    after a backward as well.
    """
    return frozenset(way.compute for way in (WAYS[:1] if num_segments > 1 else WAYS))
