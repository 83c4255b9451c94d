"""The links that a simulated plan uses, and the rules by which traffic shares them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from megatron.fold3d.plan.device_queues import MOST_OUTSTANDING
from megatron.fold3d.plan.ir import Op
from megatron.fold3d.plan.ops import WAYS

GradSyncOrder = Literal["fifo", "edf"]


class Use(NamedTuple):
    """The use of a link between switches by a flow."""

    link: int
    flows: int
    """The number of equal flows that share the link, this flow included."""


@dataclass(frozen=True, slots=True)
class Routes:
    """The links between switches that flows use; empty if no link is scarcer than a NIC.

    A simulated rank represents all nodes that hold the same part of the model. These nodes send the
    same amounts through the same switches, or through other switches with the same load. So a link
    here represents all links with the same load.
    """

    capacities: tuple[float, ...] = ()
    """Bandwidth of each link in one direction, relative to the NICs of a node."""
    of_flow: Mapping[tuple[int, int], tuple[Use, ...]] = field(default_factory=dict)
    """The links by (sending, receiving) pipeline rank; (r, r) has the links of r's DP.sync."""

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
    """Whether DDP's hooks launch collectives inside a stage's last backward: see `plan.ir.hooked`.

    The backward is then cut into equal parts, with a launch after each part.
    """
    most_outstanding: int | None = MOST_OUTSTANDING
    """The number of unfinished NCCL operations at which the host waits; None means no limit."""
    tensor_parallel: bool = False
    """Whether a collective cuts each forward and backward in two.

    The collective takes no time, since the computation includes it, but it can cause a deadlock.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The rules of a simulation: routes, priorities, waits for sends, and GPUs."""

    nic_of_rank: tuple[int, ...] | None = None
    """The NIC that each rank uses; None gives every rank its own."""
    routes: Routes = NO_SWITCHES
    """The links between switches that messages and DP.sync take."""
    grad_sync_order: GradSyncOrder = "fifo"
    """With "edf" (earliest deadline first), DP.sync that is needed earlier overtakes the others."""
    preemptive: bool = True
    """Whether PP.sync goes before DP.sync on a shared link; otherwise they share it fairly."""
    pause_share: float = 1.0
    """With ``preemptive``, the share of time for which PP.sync may keep DP.sync waiting."""
    sends_waited_for: frozenset[Op] = frozenset()
    """The computations (FORWARD, BACKWARD) after which a rank waits until the result has arrived.

    If sends are buffered, the rank waits only until the buffer has taken the message.
    """
    shard_shares: tuple[tuple[float, float], ...] = ()
    """When reductions to shards start between weight gradients: see `policy.shard_order`.

    Each pair is a share of the weight gradients' work, and the share of the reduction started by
    then. If empty, the two shares are equal.
    """
    overlap_tensor_parallel: bool = False
    """Whether neighbouring micro-batches are computed in pairs: see `plan.passes.pairs`.

    A plan of several ranks must then have transfers.
    """
    combined: bool = False
    """Whether forwards run as one with backwards: see `plan.passes.combined`."""
    contended: bool = True
    """Whether messages share links; otherwise each message takes ``Costs.p2p_s``."""
    device: Device | None = None
    """The GPUs that run the plan.

    With None, every stream has its own queue, every receive is posted in time, and launches cost
    nothing. Otherwise DP.sync runs in the order of its launch, and ``grad_sync_order`` is ignored.
    """


PLAIN = Link()


def sends_stock_waits_for(num_segments: int) -> frozenset[Op]:
    """Return the computations after which stock Megatron waits for the transfer of the result.

    Stock waits after a forward, because it frees the output tensor. Without virtual stages it also
    waits after a backward.
    """
    return frozenset(way.compute for way in (WAYS[:1] if num_segments > 1 else WAYS))
