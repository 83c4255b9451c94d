"""What computations wait for: messages, each named by its RECV, and copies from the host."""

from megatron.fold3d.plan.ir import Action, Op

_READ = {Op.FORWARD: Op.RECV_F, Op.BACKWARD: Op.RECV_B}
_COMPUTED = {receive: computation for computation, receive in _READ.items()}
_SENT = {Op.RECV_F: Op.SEND_F, Op.RECV_B: Op.SEND_B}
_RESULTS = {
    Op.FORWARD: (1, Op.RECV_F),
    Op.SEND_F: (1, Op.RECV_F),
    Op.BACKWARD: (-1, Op.RECV_B),
    Op.SEND_B: (-1, Op.RECV_B),
}


def message_to(computation: Action) -> Action | None:
    """Return the message that a computation reads, if its op reads any: 1F0 reads 1RECV_F0."""
    stage, op, microbatch = computation
    return Action(stage, _READ[op], microbatch) if op in _READ else None


def reload_to(computation: Action) -> Action:
    """Return the copy from the host that a computation reads, if there is one: 1B0, 1RELOAD0."""
    return computation._replace(op=Op.RELOAD)


def message_from(action: Action) -> Action:
    """Return the message that carries a result: from 0F0, and from 0SEND_F0, it is 1RECV_F0."""
    stage, op, microbatch = action
    step, receive = _RESULTS[op]
    return Action(stage + step, receive, microbatch)


def reader_of(message: Action) -> Action:
    """Return the computation that reads a message: 1RECV_F0 is for 1F0."""
    stage, op, microbatch = message
    return Action(stage, _COMPUTED[op], microbatch)


def source_of(message: Action) -> Action:
    """Return the computation whose result a message carries: 1RECV_F0 carries that of 0F0."""
    stage, op, microbatch = message
    return Action(stage - 1 if op is Op.RECV_F else stage + 1, _COMPUTED[op], microbatch)


def send_of(message: Action) -> Action:
    """Return the action that sends a message: 1RECV_F0 is sent by 0SEND_F0."""
    stage, op, microbatch = message
    return Action(stage - 1 if op is Op.RECV_F else stage + 1, _SENT[op], microbatch)
