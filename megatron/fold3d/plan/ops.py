"""The table of ops: how each op is spelled, what it occupies, needs, costs and holds.

Text, verifier, simulator, memory, streams, traces and pages read this table, and have no other list
of ops and no other rules per op. A new op is a row here, a pass that puts it into plans, and a
handler that runs it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import NamedTuple


class Op(StrEnum):
    """The kind of an action; the value is its spelling, as in torch if torch has the action."""

    FORWARD = "F"
    BACKWARD = "B"
    RECOMPUTE = "R"  # full recomputation, where it runs before BACKWARD instead of inside
    WEIGHT = "W"  # weight gradients alone, where a schedule splits them from BACKWARD
    WEIGHT_PART = "W:"  # weight gradients of all micro-batches, some parameters at a time
    SEND_F = "SEND_F"  # output of `stage` goes to `stage + 1`
    RECV_F = "RECV_F"  # post the receive of the input of `stage`; its F waits for the tensor
    SEND_B = "SEND_B"  # gradient of the input of `stage` goes to `stage - 1`
    RECV_B = "RECV_B"  # post the receive of the gradient of the output of `stage`
    ALL_REDUCE = "ALL_REDUCE"  # start DP.sync of gradients: every replica gets the whole sum
    REDUCE_SCATTER = "REDUCE_SCATTER"  # the same, but every replica gets its shard of the sum
    REDUCE_KEPT = "REDUCE_KEPT"  # start DP.sync of gradients that Megatron reads after backwards
    FINALIZE = "FINALIZE"  # wait for REDUCE_KEPT, then let Megatron read these gradients
    STEP = "STEP"  # wait for the stage's sums, take the optimizer's step, zero the gradients
    ALL_GATHER = "ALL_GATHER"  # start the all-gather of the stage's updated parameters
    FREE_PARAM = "FREE_PARAM"  # the stage's forwards are done: keep only this replica's shard
    ALL_GATHER_B = "ALL_GATHER_B"  # start the all-gather once more, for the backwards
    FREE_PARAM_B = "FREE_PARAM_B"  # the stage's backwards are done
    FREE_GRAD = "FREE_GRAD"  # wait for the sums, and keep only this replica's shard of the sums
    OFFLOAD = "OFFLOAD"  # saved activations of (stage, microbatch) start to leave the device
    RELOAD = "RELOAD"  # offloaded activations start to come back


class OpScope(Enum):
    """What the number of an action means; the value is an example."""

    MICROBATCH = "2F0"
    """A micro-batch."""
    PART = "2ALL_REDUCE:250"
    """The end, in thousandths, of a part of the stage's gradients or of their computation.

    Without a number, the part is the rest.
    """
    STAGE = "2STEP"
    """The action has no number: it is for the whole stage."""


class Place(StrEnum):
    """The stream or link of a rank that an action occupies."""

    COMPUTE = "compute"
    UPDATE = "update"
    """The compute stream, between two iterations of the stage."""
    SEND = "send"
    RECV = "recv"
    DP_SYNC = "dp_sync"
    DP_SYNC_KEPT = "dp_sync_kept"
    """The link of `DP_SYNC`, but not its queue."""
    TO_HOST = "to_host"
    TO_DEVICE = "to_device"
    HOST = "host"
    """Neither a stream nor a link: the action takes effect as soon as its needs have run."""


class Which(Enum):
    """Which actions of a needed op an action needs, within one loop of a stage: see `plan.ir`."""

    SAME = "the one with the same number"
    EVERY = "all of the stage"
    UP_TO = "the parts of the stage that end no later, and the one in which it ends"
    INPUT = "the send that carries its result, or the computation itself on the same rank"


@dataclass(frozen=True, slots=True)
class Need:
    """An op that must have run before an action.

    Attributes:
        beside: the need holds only if the plan has an action of this op with the same number;
            with None the need always holds.
        step: the needed action's stage minus the needing action's stage.
    """

    op: Op
    which: Which = Which.SAME
    beside: Op | None = None
    step: int = 0


class Row(NamedTuple):
    """One op's row of the table."""

    scope: OpScope
    place: Place
    title: str
    """The op's name for readers of diagrams."""
    kind: str = ""
    """The op's color, a key of `observe.report.palette.HUES`; an empty one is not drawn."""
    cost: str = ""
    """The field of `Costs` with the op's seconds."""
    needs: tuple[Need, ...] = ()
    takes: str = ""
    """The memory that the op takes when it begins: see `plan.memory`."""
    gives: tuple[str, ...] = ()
    """The memory that the op gives back when it ends."""

    @property
    def waits(self) -> str:
        """The text for a wait for the op in diagrams."""
        return f"waits for {self.title}"


def _if_any(op: Op, which: Which = Which.SAME) -> Need:
    return Need(op, which, beside=op)


_M, _P, _S = OpScope.MICROBATCH, OpScope.PART, OpScope.STAGE
_RELOADED = Need(Op.RELOAD, beside=Op.OFFLOAD)
_GRADIENTS = (
    Need(Op.BACKWARD, Which.EVERY),
    _if_any(Op.WEIGHT, Which.EVERY),
    _if_any(Op.WEIGHT_PART, Which.UP_TO),
)

TABLE: Mapping[Op, Row] = {
    Op.FORWARD: Row(
        *(_M, Place.COMPUTE, "forward", "forward", "forward_s"),
        needs=(Need(Op.FORWARD, Which.INPUT, step=-1), _if_any(Op.ALL_GATHER)),
        takes="saved",
    ),
    Op.BACKWARD: Row(
        *(_M, Place.COMPUTE, "backward", "backward", "backward_s"),
        needs=(
            *(Need(Op.FORWARD), Need(Op.BACKWARD, Which.INPUT, step=1)),
            *(_if_any(Op.RECOMPUTE), _RELOADED, _if_any(Op.ALL_GATHER_B)),
        ),
        takes="gradient",
        gives=("saved", "recomputed", "on_host"),
    ),
    Op.RECOMPUTE: Row(
        *(_M, Place.COMPUTE, "recomputation", "recompute", "recompute_s"),
        needs=(Need(Op.FORWARD), _RELOADED, _if_any(Op.ALL_GATHER_B)),
        takes="recomputed",
    ),
    Op.WEIGHT: Row(
        *(_M, Place.COMPUTE, "weight gradient", "weight", "weight_s"),
        needs=(Need(Op.BACKWARD),),
        gives=("delayed",),
    ),
    Op.WEIGHT_PART: Row(
        *(_P, Place.COMPUTE, "weight gradient", "weight", "weight_s"),
        needs=(Need(Op.BACKWARD, Which.EVERY),),
        gives=("delayed",),
    ),
    Op.SEND_F: Row(
        *(_M, Place.SEND, "PP.sync of its forward", "p2p"),
        needs=(Need(Op.FORWARD), Need(Op.RECV_F, step=1)),
    ),
    Op.RECV_F: Row(_M, Place.RECV, "PP.sync of a forward", "p2p"),
    Op.SEND_B: Row(
        *(_M, Place.SEND, "PP.sync of its backward", "p2p"),
        needs=(Need(Op.BACKWARD), Need(Op.RECV_B, step=-1)),
    ),
    Op.RECV_B: Row(_M, Place.RECV, "PP.sync of a backward", "p2p"),
    Op.ALL_REDUCE: Row(
        *(_P, Place.DP_SYNC, "DP.sync of the gradients", "sync", "grad_sync_s"), needs=_GRADIENTS
    ),
    Op.REDUCE_SCATTER: Row(
        *(_P, Place.DP_SYNC, "DP.sync of the gradients", "sync", "grad_sync_s"), needs=_GRADIENTS
    ),
    Op.REDUCE_KEPT: Row(
        *(_S, Place.DP_SYNC_KEPT, "DP.sync of the gradients that Megatron reads", "sync"),
        cost="reduced_in_iteration_s",
        needs=_GRADIENTS,
    ),
    Op.FINALIZE: Row(_S, Place.UPDATE, "Megatron's finalization", needs=(Need(Op.REDUCE_KEPT),)),
    Op.STEP: Row(
        *(_S, Place.UPDATE, "optimizer step", "", "optimizer_s"),
        needs=(
            *(_if_any(op, Which.EVERY) for op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER)),
            _if_any(Op.FINALIZE),
        ),
    ),
    Op.ALL_GATHER: Row(
        *(_S, Place.DP_SYNC, "DP.sync of the parameters", "sync", "param_gather_s"),
        takes="parameter",
    ),
    Op.FREE_PARAM: Row(
        *(_S, Place.HOST, "parameters are freed"),
        needs=(Need(Op.ALL_GATHER), _if_any(Op.FORWARD, Which.EVERY)),
        gives=("parameter",),
    ),
    Op.ALL_GATHER_B: Row(
        *(_S, Place.DP_SYNC, "DP.sync of the parameters, for backwards", "sync", "param_gather_s"),
        needs=(Need(Op.FREE_PARAM),),
        takes="parameter",
    ),
    Op.FREE_PARAM_B: Row(
        *(_S, Place.HOST, "parameters are freed"),
        needs=(
            Need(Op.ALL_GATHER),
            *(_if_any(op, Which.EVERY) for op in (Op.BACKWARD, Op.RECOMPUTE)),
        ),
        gives=("parameter",),
    ),
    Op.FREE_GRAD: Row(
        *(_S, Place.HOST, "gradients are freed"),
        needs=(Need(Op.REDUCE_SCATTER, Which.EVERY),),
        gives=("gradient",),
    ),
    Op.OFFLOAD: Row(
        *(_M, Place.TO_HOST, "copy to the host", "copy", "offload_s"),
        needs=(Need(Op.FORWARD),),
        takes="on_host",
        gives=("saved",),
    ),
    Op.RELOAD: Row(
        *(_M, Place.TO_DEVICE, "copy from the host", "copy", "reload_s"),
        needs=(Need(Op.OFFLOAD),),
        takes="saved",
    ),
}


def _on(*places: Place) -> frozenset[Op]:
    return frozenset(op for op, row in TABLE.items() if row.place in places)


COMPUTE_OPS = _on(Place.COMPUTE)
UPDATE_OPS = _on(Place.UPDATE)
WEIGHT_OPS = frozenset(op for op, row in TABLE.items() if row.cost == "weight_s")
SEND_OPS, RECV_OPS = _on(Place.SEND), _on(Place.RECV)
P2P_OPS = SEND_OPS | RECV_OPS
SYNC_OPS = _on(Place.DP_SYNC, Place.DP_SYNC_KEPT)
TO_HOST_OPS, TO_DEVICE_OPS = _on(Place.TO_HOST), _on(Place.TO_DEVICE)
COPY_OPS = TO_HOST_OPS | TO_DEVICE_OPS
HOST_OPS = _on(Place.HOST)
LINK_OPS = SYNC_OPS | COPY_OPS
STAGE_OPS = frozenset(op for op, row in TABLE.items() if row.scope is OpScope.STAGE)
PART_OPS = frozenset(op for op, row in TABLE.items() if row.scope is OpScope.PART)
SUM_OPS = SYNC_OPS & PART_OPS
GATHER_OPS = frozenset(op for op in SYNC_OPS if TABLE[op].takes == "parameter")
FREE_OPS = frozenset(op for op, row in TABLE.items() if "parameter" in row.gives)


class Way(NamedTuple):
    """A direction of the pipeline: the ops that compute, send and receive in it."""

    compute: Op
    send: Op
    receive: Op
    step: int
    """The reading stage minus the computing stage."""


FORTH = Way(Op.FORWARD, Op.SEND_F, Op.RECV_F, 1)
BACK = Way(Op.BACKWARD, Op.SEND_B, Op.RECV_B, -1)
WAYS = (FORTH, BACK)
PEER: Mapping[Op, int] = {way.send: way.step for way in WAYS} | {
    way.receive: -way.step for way in WAYS
}
"""By transfer op, the other rank minus the own rank."""
