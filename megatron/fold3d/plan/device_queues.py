"""The rules by which a GPU runs a plan: streams, hardware queues, and waits.

`predict.simulator.device_run`, which simulates a plan and verifies that it ends, follows these
rules and no others. The rules come from the CUDA manual and from the sources of NCCL, torch,
Megatron and FOLD3D. **No GPU has confirmed them.**

1. The host issues a program's actions in their order and does not wait for the device. (CUDA
   launches are asynchronous; `runtime/executor.py` runs a program from front to back.)
2. Each action is an item of a stream, and the items of a stream run one after the other. All
   computations share one stream. Sends and receives of each direction have a stream each: `P2P`
   makes a process group per direction, and `ProcessGroupNCCL` gives each pair of ranks in a group a
   communicator and a stream. DP.sync has one stream, copies to the host and to the device one each.
   With one queue, receives of odd micro-batches have a second stream (`AlternatingP2P`), and so do
   reductions of odd segments that are not carried (`SecondLane`).
3. An item of communication, or a copy, begins when the computations issued before it have ended.
   (`ProcessGroupNCCL` makes its stream wait for an event of the current stream; `Copies` does the
   same.)
4. Streams share ``CUDA_DEVICE_MAX_CONNECTIONS`` hardware queues. A queue starts items in the order
   of issue. An item that waits for its stream or an event blocks all later items, of any
   stream. (CUDA C Programming Guide. Megatron demands 1 for tensor or context parallelism on GPUs
   before Blackwell; CUDA's default is 8.) CUDA does not say which streams share a queue: here
   streams are assigned round-robin, in the order of their first use. A plan that ends with one
   queue ends with any number of queues, since more queues block less.
5. A transfer ends once both of its sides have begun, a reduction once all replicas have begun it.
   Replicas, and the ranks of a tensor-parallel group, run the same programs in the same order, so
   one rank represents all.
6. A computation waits for the tensors that it reads, a STEP for the sums of its stage. Both wait
   on the compute stream. (``work.wait()`` of NCCL makes the current stream wait.)
7. The compute stream waits for a send when `UNFINISHED_SENDS` others have followed it, and for all
   of them at the end of an iteration. (`runtime/transfers/p2p.py`.)
8. The host waits while `MOST_OUTSTANDING` of the NCCL operations that it has issued are unfinished:
   NCCL's proxy has 2048 slots, and a collective takes 16 to 32 of them. (nccl#2353 reports a hang.)
9. With tensor parallelism, collectives on a separate stream cut a computation into parts. Each
   collective waits for the part before it, and the next part waits for the collective. Inside a
   node they need no proxy.
"""

from collections import defaultdict, deque
from collections.abc import Container, Mapping
from enum import IntEnum

from megatron.fold3d.plan.ir import Action, Op, Program, carried
from megatron.fold3d.plan.ops import SEND_OPS, SUM_OPS, TABLE, Place

CONNECTIONS = (1, 8, 32)
"""Numbers of queues: Megatron's for tensor parallelism, CUDA's default, CUDA's maximum."""
MOST_OUTSTANDING = 64
UNFINISHED_SENDS = 16


class Stream(IntEnum):
    """The streams of a rank."""

    COMPUTE = 0
    SEND_F = 1
    RECV_F = 2
    SEND_B = 3
    RECV_B = 4
    DP_SYNC = 5
    TO_HOST = 6
    TO_DEVICE = 7
    TP_SYNC = 8
    DP_SYNC_KEPT = 9
    """REDUCE_KEPT, which has a separate process group."""
    RECV_F_ODD = 10
    """With one queue, receives of odd micro-batches; `RECV_F` then has the even ones."""
    RECV_B_ODD = 11
    DP_SYNC_ODD = 12
    """With one queue, reductions of odd segments; `DP_SYNC` has other reductions and gathers."""


_ON_COMPUTE = (Place.COMPUTE, Place.UPDATE, Place.HOST)
_PER_OP = (Place.SEND, Place.RECV)
STREAM_OF: Mapping[Op, Stream] = {
    op: Stream.COMPUTE
    if row.place in _ON_COMPUTE
    else Stream[op.name if row.place in _PER_OP else row.place.name]
    for op, row in TABLE.items()
}
"""The streams by op; a `Place.HOST` action occupies a stream only if it waits."""
_OF_ODD = {Op.RECV_F: Stream.RECV_F_ODD, Op.RECV_B: Stream.RECV_B_ODD}


def stream_of(action: Action, *, alternates: bool, apart: Container[int] = ()) -> Stream:
    """Return the stream of an action.

    Args:
        alternates: whether receives use two streams in turns, as our runtime's do with one queue.
        apart: the stages of `reduced_apart`, if reductions use two streams too.
    """
    if alternates and action.op in _OF_ODD and action.microbatch and action.microbatch % 2:
        return _OF_ODD[action.op]
    if action.op in SUM_OPS and action.stage in apart:
        return Stream.DP_SYNC_ODD
    return STREAM_OF[action.op]


def reduced_apart(program: Program, num_ranks: int) -> frozenset[int]:
    """Return the stages whose reductions have a second stream with one queue.

    These are the stages of odd segments. Carried reductions have other process groups, but share
    one stream: the plan starts them in slices, and each slice ends before the next is launched.
    """
    odd = {stage for stage, op, _ in program if op in SUM_OPS and stage // num_ranks % 2}
    return frozenset(odd - carried(program).keys())


def send_waits(program: Program) -> dict[int, list[Action]]:
    """Return, by index in the program, the sends that the compute stream waits for (rule 7)."""
    waits: dict[int, list[Action]] = defaultdict(list)
    leaving: deque[Action] = deque()
    for index, action in enumerate(program):
        if action.op in SEND_OPS:
            leaving.append(action)
            if len(leaving) > UNFINISHED_SENDS:
                waits[index].append(leaving.popleft())
    if leaving:
        waits[len(program) - 1] += leaving
    return waits
