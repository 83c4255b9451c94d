"""How a GPU runs a plan: streams, hardware queues, and whether the plan still ends.

Keeps one invariant: the simulator follows these rules, and no others. They come from the CUDA
manual and from the sources of NCCL, torch, Megatron and FOLD3D. **No GPU has confirmed them.**

1. The host issues a program's actions in their order and does not wait for the device. (CUDA
   launches are asynchronous; `runtime/executor.py` runs a program from front to back.)
2. Each action is an item of a stream, and the items of a stream run one after the other. All
   computations share one stream. Sends and receives of each direction have a stream each: `P2P`
   makes a process group per direction, and `ProcessGroupNCCL` gives each pair of ranks in a group a
   communicator and a stream. DP.sync has one stream, copies to the host and to the device one each.
   With one queue, receives of odd micro-batches have a stream of their own (`AlternatingP2P`), and
   reductions of odd segments have one too (`SecondLane`), unless they are carried.
3. An item of communication, or a copy, begins when the computations issued before it have ended.
   (`ProcessGroupNCCL` makes its stream wait for an event of the current stream; `Copies` does the
   same.)
4. Streams share ``CUDA_DEVICE_MAX_CONNECTIONS`` hardware queues. A queue starts items in the order
   of issue. An item that waits, for its stream or an event, blocks all items behind it, of any
   stream. (CUDA C Programming Guide. Megatron demands 1 for tensor or context parallelism on GPUs
   before Blackwell; CUDA's default is 8.) CUDA does not say which streams share a queue: here they
   are assigned round-robin, in the order of their first use. A plan that ends with one queue ends
   with any number, since more queues block less.
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

from megatron.fold3d.plan.ir import Action, Op, Plan, PlanError, Program, carried, gc_paused
from megatron.fold3d.plan.ops import (
    HOST_OPS,
    P2P_OPS,
    SEND_OPS,
    SUM_OPS,
    SYNC_OPS,
    TABLE,
    WAYS,
    Place,
)
from megatron.fold3d.plan.passes.transfers import add_p2p
from megatron.fold3d.plan.verify import error_at
from megatron.fold3d.plan.waits import Waits

CONNECTIONS = (1, 8, 32)
"""Queue counts in use: Megatron's for tensor parallelism, CUDA's default, CUDA's maximum."""
MOST_OUTSTANDING = 64
UNFINISHED_SENDS = 16

_ITERATIONS = 2  # a DP.sync that the first carries may hold up the second
_ROWS = 8  # ranks named in an error


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
    """What Megatron reads at the end of the iteration, in its own group."""
    RECV_F_ODD = 10
    """With one queue, receives of odd micro-batches; RECV_F then has the even ones."""
    RECV_B_ODD = 11
    DP_SYNC_ODD = 12
    """With one queue, reductions of odd segments; DP_SYNC then has the others and all-gathers."""


_ON_COMPUTE = (Place.COMPUTE, Place.UPDATE, Place.HOST)
_PER_OP = (Place.SEND, Place.RECV)
STREAM_OF: Mapping[Op, Stream] = {
    op: Stream.COMPUTE
    if row.place in _ON_COMPUTE
    else Stream[op.name if row.place in _PER_OP else row.place.name]
    for op, row in TABLE.items()
}
"""What the host does at once has an item only where it waits for something."""
_OF_ODD = {Op.RECV_F: Stream.RECV_F_ODD, Op.RECV_B: Stream.RECV_B_ODD}
NCCL_OPS = P2P_OPS | SYNC_OPS
_RECEIVED = {way.compute: way.receive for way in WAYS}


def stream_of(action: Action, *, alternates: bool, apart: Container[int] = ()) -> Stream:
    """Return the stream of an action.

    Args:
        action: the action.
        alternates: whether receives use two streams in turns, as ours do with one queue.
        apart: the stages of `reduced_apart`, if reductions use two streams as well.
    """
    if alternates and action.op in _OF_ODD and action.microbatch and action.microbatch % 2:
        return _OF_ODD[action.op]
    if action.op in SUM_OPS and action.stage in apart:
        return Stream.DP_SYNC_ODD
    return STREAM_OF[action.op]


def reduced_apart(program: Program, num_ranks: int) -> frozenset[int]:
    """Return the stages whose reductions have a stream of their own with one queue.

    They are those of odd segments. Carried reductions have process groups of their own, and one
    stream: the plan starts them in slices, of which none runs when the next is launched.
    """
    odd = {stage for stage, op, _ in program if op in SUM_OPS and stage // num_ranks % 2}
    return frozenset(odd - carried(program).keys())


def queue_of(streams: Mapping[Stream, None], connections: int) -> dict[Stream, int]:
    """Return the queue of each stream; ``streams`` are in the order of their first use."""
    return {stream: index % connections for index, stream in enumerate(streams)}


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


@gc_paused()
def verify_on_device(plan: Plan, connections: int, *, tensor_parallel: bool = False) -> None:
    """Check that the plan cannot deadlock on GPUs with this many hardware queues.

    The plan must have passed `verify`, whose checks are not repeated.

    Args:
        plan: if it has no transfers, those are checked that `add_p2p` adds for this many queues.
        connections: hardware queues, ``CUDA_DEVICE_MAX_CONNECTIONS``.
        tensor_parallel: whether collectives cut the computations.

    Raises:
        PlanError: ranks block each other; the message shows each rank's action, and marks it.
    """
    if connections < 1:
        raise PlanError(f"found {connections} hardware queues; CUDA has from 1 to 32")
    if plan.num_ranks > 1 and not plan.has_p2p:
        plan = add_p2p(plan, receives_late=connections == 1)
    _Play(plan, connections, tensor_parallel=tensor_parallel).run()


class _Play:
    """The items of all ranks over several iterations, and which of them have begun.

    Items are numbered, those of a rank in the order of issue. An item that has begun always ends,
    except for a transfer, which also needs its other side to begin.
    """

    def __init__(self, plan: Plan, connections: int, *, tensor_parallel: bool) -> None:
        self.plan, self.connections = plan, connections
        self.tensor_parallel = tensor_parallel
        # Of each item.
        self.actions: list[Action] = []
        self.index: list[int] = []  # in its program
        self.waits: list[tuple[int, ...]] = []  # the items that must be over
        self.streams: list[Stream] = []
        self.other_side: dict[int, int] = {}  # of a transfer
        self.begun = bytearray()
        # Of each rank.
        self.first: list[int] = []  # where its items begin; one more than there are ranks
        self.issued: list[int] = []
        self.unfinished: list[list[int]] = [[] for _ in plan.programs]  # of NCCL
        self.queues: list[list[deque[int]]] = []

        sides: dict[tuple[int, Action], int] = {}
        for program in plan.programs:
            self.first.append(len(self.actions))
            self._lay_out(program, sides)
        self.first.append(len(self.actions))
        self.issued = self.first[:-1]
        for (iteration, (stage, op, microbatch)), item in sides.items():
            if op in SEND_OPS:
                forward = op is Op.SEND_F
                receive = Op.RECV_F if forward else Op.RECV_B
                to = Action(stage + (1 if forward else -1), receive, microbatch)
                other = sides[iteration, to]
                self.other_side[item], self.other_side[other] = other, item
        self.begun = bytearray(len(self.actions))
        for rank in range(plan.num_ranks):
            items = range(self.first[rank], self.first[rank + 1])
            queue_of_stream = queue_of(dict.fromkeys(self.streams[i] for i in items), connections)
            queues: list[deque[int]] = [deque() for _ in range(connections)]
            for item in items:
                queues[queue_of_stream[self.streams[item]]].append(item)
            self.queues.append([queue for queue in queues if queue])

    def _lay_out(self, program: Program, sides: dict[tuple[int, Action], int]) -> None:
        """Add a rank's items, with the items that each of them waits for."""
        on_stream: dict[Stream, int] = {}  # the last item
        of_action: dict[Action, int] = {}  # the last item
        reads = Waits(program)
        waits_for_sends = send_waits(program)
        alternates = self.connections == 1
        apart = reduced_apart(program, self.plan.num_ranks) if alternates else ()

        def add(index: int, action: Action, stream: Stream, *after: int | None) -> int:
            item = len(self.actions)
            before = (on_stream.get(stream), on_stream.get(Stream.COMPUTE), *after)
            self.waits.append(tuple({i for i in before if i is not None}))
            self.actions.append(action)
            self.index.append(index)
            self.streams.append(stream)
            on_stream[stream] = item
            return item

        for iteration in range(_ITERATIONS):
            for index, action in enumerate(program):
                op = action.op
                read = [of_action.get(awaited.action) for awaited in reads.at(index, action)]
                if op in HOST_OPS and not read:
                    continue
                if op in _RECEIVED:
                    message = Action(action.stage, _RECEIVED[op], action.microbatch)
                    read.append(of_action.get(message))
                stream = stream_of(action, alternates=alternates, apart=apart)
                item = add(index, action, stream, *read)
                of_action[action] = item
                if self.tensor_parallel and (op is Op.FORWARD or op is Op.BACKWARD):
                    collective = add(index, action, Stream.TP_SYNC)
                    of_action[action] = add(index, action, Stream.COMPUTE, collective)
                elif op in P2P_OPS:
                    sides[iteration, action] = item
                for send in waits_for_sends.get(index, ()):
                    add(index, send, Stream.COMPUTE, of_action[send])

    def run(self) -> None:
        """Begin every item that can begin; raise an error if some item never can."""
        moved = True
        while moved:
            moved = False
            for rank in range(self.plan.num_ranks):
                while self._advance(rank):
                    moved = True
        if any(queue for queues in self.queues for queue in queues):
            raise self._deadlock()

    def _advance(self, rank: int) -> bool:
        """Issue all items that the host can issue; begin all that can begin, if any did."""
        self._issue(rank)
        moved = False
        for queue in self.queues[rank]:
            while queue and queue[0] < self.issued[rank] and self._unmet(queue[0]) is None:
                self.begun[queue.popleft()] = True
                moved = True
        return moved

    def _issue(self, rank: int) -> None:
        unfinished, end = self.unfinished[rank], self.first[rank + 1]
        while (item := self.issued[rank]) < end:
            if self.actions[item].op in NCCL_OPS and self.streams[item] is not Stream.COMPUTE:
                if len(unfinished) >= MOST_OUTSTANDING:
                    unfinished[:] = [other for other in unfinished if not self._is_over(other)]
                    if len(unfinished) >= MOST_OUTSTANDING:
                        return
                unfinished.append(item)
            self.issued[rank] += 1

    def _is_over(self, item: int) -> bool:
        return bool(self.begun[item] and self.begun[self.other_side.get(item, item)])

    def _unmet(self, item: int) -> int | None:
        """Return an unfinished item that must be over before this one begins."""
        return next((other for other in self.waits[item] if not self._is_over(other)), None)

    def _deadlock(self) -> PlanError:
        marked, reasons = {}, []
        for rank, queues in enumerate(self.queues):
            if (item := self.issued[rank]) < self.first[rank + 1]:
                marked[rank] = self.index[item]
                found = f"at {self.actions[item]} with {MOST_OUTSTANDING} of NCCL's operations"
                reasons.append(f"rank {rank}'s host waits {found} unfinished")
                continue
            for item in sorted(queue[0] for queue in queues if queue):
                if (needed := self._unmet(item)) is not None:
                    marked[rank] = self.index[item]
                    reasons.append(f"rank {rank} {self._held_up(item, self.actions[needed])}")
                    break
        number = "one hardware queue"
        if self.connections > 1:
            number = f"{self.connections} hardware queues"
        return error_at(self.plan, marked, f"deadlock with {number}: {'; '.join(reasons[:_ROWS])}")

    def _held_up(self, item: int, needed: Action) -> str:
        where = f"is held up at {self.actions[item]}"
        if self.streams[item] is Stream.COMPUTE and self.actions[item].op in SEND_OPS:
            where = "lets its computations wait"
        return f"{where} until {needed} is over"
