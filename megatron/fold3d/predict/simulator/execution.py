"""How a runtime executes a plan: what waits for what, and who goes first on a shared link."""

from dataclasses import dataclass
from typing import Literal

from megatron.fold3d.plan.ir import Op

GradSyncOrder = Literal["fifo", "edf"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """What a simulation has to know beside the plan and its costs."""

    nic_of_rank: tuple[int, ...] | None = None
    """The NIC that each rank uses; None gives every rank its own."""
    grad_sync_order: GradSyncOrder = "fifo"
    """With "edf", DP.sync that is needed earlier overtakes what was started before it."""
    preemptive: bool = True
    """Whether PP.sync goes before DP.sync on a shared link; otherwise they share it fairly."""
    pause_share: float = 1.0
    """If it goes first: the part of each second for which it may keep DP.sync waiting."""
    flush: bool = False
    """Whether no rank begins an iteration before all ranks have ended the one before."""
    in_order: bool = False
    """Whether messages from one rank to another go one after the other, as in one communicator.

    Otherwise they share the link.
    """
    sends_waited_for: frozenset[Op] = frozenset()
    """The computations (FORWARD, BACKWARD) after which a rank waits until the result has arrived.

    It does not where sends are buffered.
    """
    backward_share: tuple[float, ...] = ()
    """Per stage, the part of DP.sync that its REDUCE_GRAD starts (paper Algorithm 2).

    The rest of all stages follows the last action. Without shares, REDUCE_GRAD starts everything.
    """


PLAIN = Execution()


def sends_stock_waits_for(num_segments: int) -> frozenset[Op]:
    """Return the computations after which stock Megatron waits for the transfer of the result.

    It waits for a forward's, because it frees the tensor; without virtual stages it waits for a
    backward's as well.
    """
    return frozenset({Op.FORWARD} if num_segments > 1 else {Op.FORWARD, Op.BACKWARD})
