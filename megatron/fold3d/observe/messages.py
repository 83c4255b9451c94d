"""What computations wait for: messages, each named by its RECV, and copies from the host."""

from megatron.fold3d.plan.ir import Action
from megatron.fold3d.plan.ops import TO_DEVICE_OPS, WAYS

(_RELOAD,) = TO_DEVICE_OPS
_READ_BY = {way.compute: way for way in WAYS}
_WAY_OF = {op: way for way in WAYS for op in (way.compute, way.send, way.receive)}


def message_to(computation: Action) -> Action | None:
    """Return the message that a computation reads, if its op reads any: 1F0 reads 1RECV_F0."""
    stage, op, microbatch = computation
    return Action(stage, _READ_BY[op].receive, microbatch) if op in _READ_BY else None


def reload_to(computation: Action) -> Action:
    """Return the copy from the host that a computation reads, if there is one: 1B0, 1RELOAD0."""
    return computation._replace(op=_RELOAD)


def message_from(action: Action) -> Action:
    """Return the message that carries a result: from 0F0, and from 0SEND_F0, it is 1RECV_F0."""
    stage, op, microbatch = action
    return Action(stage + _WAY_OF[op].step, _WAY_OF[op].receive, microbatch)


def reader_of(message: Action) -> Action:
    """Return the computation that reads a message: 1RECV_F0 is for 1F0."""
    stage, op, microbatch = message
    return Action(stage, _WAY_OF[op].compute, microbatch)


def source_of(message: Action) -> Action:
    """Return the computation whose result a message carries: 1RECV_F0 carries that of 0F0."""
    stage, op, microbatch = message
    return Action(stage - _WAY_OF[op].step, _WAY_OF[op].compute, microbatch)


def send_of(message: Action) -> Action:
    """Return the action that sends a message: 1RECV_F0 is sent by 0SEND_F0."""
    stage, op, microbatch = message
    return Action(stage - _WAY_OF[op].step, _WAY_OF[op].send, microbatch)
