"""The pass that adds the transfers between stages (PP.sync).

A result is sent when its computation ends. The receive is posted one computation ahead, but not
ahead of a computation that the result depends on, as 1B0 here on 0F1:

    before  rank 0  0F0 0F1 0B0 0B1
            rank 1  1F0 1F1 1B0 1B1
    after   rank 0  0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1
            rank 1  1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1

A message does not leave before its receive is posted. Beside DP.sync a message may take longer than
a computation, and each computation then waits for the rest. Receives that are posted
``receives_ahead`` computations ahead prevent this wait.

If all streams of a GPU share one hardware queue, a receive that waits for the previous receive
blocks computation. With ``receives_late`` a transfer takes a separate round. The receive is posted
after the computation of the round in which the message is sent, unless the previous message has
been read by then:

    before  rank 0  0F0 0F1 0F2 2F0 2F1 2F2
            rank 1  1F0 1F1 1F2 3F0 3F1 3F2
    after   rank 0  0F0 0SEND_F0 0F1 0SEND_F1 2RECV_F0 0F2 0SEND_F2 2RECV_F1 2F0 2RECV_F2 2SEND_F0
                    2F1 2SEND_F1 2F2 2SEND_F2
            rank 1  1RECV_F0 1RECV_F1 1F0 1RECV_F2 1SEND_F0 1F1 1SEND_F1 3RECV_F0 1F2 1SEND_F2
                    3RECV_F1 3F0 3RECV_F2 3F1 3F2
"""

from collections import deque

from megatron.fold3d.plan.ir import Action, Op, Plan, PlanError, gc_paused
from megatron.fold3d.plan.ops import COMPUTE_OPS, P2P_OPS, WAYS

RECEIVES_AHEAD = 3
"""The ``receives_ahead`` of runs without a GPU; five gained no more than three."""
_WAY_OF = {way.compute: way for way in WAYS}


@gc_paused()
def add_p2p(
    plan: Plan,
    *,
    receives_late: bool = False,
    receives_ahead: int = 1,
    in_pairs: bool = False,
) -> Plan:
    """Add the transfers between stages: paper Algorithm 2, ``PPComm``.

    The pass runs the plan in rounds, one computation per rank and round. The send of a result
    follows its computation. The receiving rank posts the receive before the computation that it
    runs in the same round, or before an earlier one, so that the receive is open while the result
    is being computed; but behind a computation that the result depends on. All ranks can follow
    this order even if each send blocks until its receive is posted, so the plan cannot deadlock.
    Other actions that follow a computation follow its send.

    Args:
        plan: the computations; transfers that the plan already has are replaced.
        receives_late: whether a transfer takes a separate round, and is read a round later. The
            receive is posted after the computation that its rank started last, so that it does not
            wait for the previous message. If this computation or an earlier one reads the previous
            message, the receive is posted before this computation instead. In each round a rank
            posts its receives before its sends.
        receives_ahead: the number of the rank's computations between a receive and the end of the
            round in which the message is sent. On a GPU only 1 is safe: a computation may wait for
            the allocator, a kernel's first launch or the one hardware queue, which may wait for a
            receive. More may stand ahead of what they depend on. Late receives ignore this number.
        in_pairs: whether the computation before the latest may not be over when that one begins.

    Raises:
        PlanError: the compute order itself cannot run.
    """
    num_ranks, num_stages = plan.num_ranks, plan.num_stages
    programs = [[a for a in program if a.op not in P2P_OPS] for program in plan.programs]
    arrived, needs = _Arrived(plan), _Needs(num_ranks)
    reader: dict[tuple[int, Op], Action] = {}  # the reader of a direction's last message
    lowered: list[list[Action]] = [[] for _ in programs]
    kept = 1 if receives_late else receives_ahead
    last = [deque([0] * kept, kept) for _ in programs]  # indices of computations in `lowered`
    position = [0] * num_ranks

    def take_over(rank: int) -> None:
        """Copy the actions before the rank's next computation."""
        program, index = programs[rank], position[rank]
        while index < len(program) and program[index].op not in COMPUTE_OPS:
            lowered[rank].append(program[index])
            index += 1
        position[rank] = index

    for rank in range(num_ranks):
        take_over(rank)
    running = [rank for rank in range(num_ranks) if position[rank] < len(programs[rank])]
    on_the_way: list[Action] = []  # results that arrive one round later
    while running:
        ready = [
            (rank, action)
            for rank in running
            if arrived.allow(action := programs[rank][position[rank]])
        ]
        if not ready and not on_the_way:
            waiting = ", ".join(f"rank {r} at {programs[r][position[r]]}" for r in running)
            raise PlanError(
                f"no rank can go on: {waiting}; each needs a result that comes later or never"
            )
        for action in on_the_way:
            arrived.add(action)
        on_the_way = []
        for rank, action in ready:
            position[rank] += 1
            needs.compute(rank, action)
            last[rank].append(len(lowered[rank]))
            lowered[rank].append(action)
            if not receives_late:
                arrived.add(action)
            else:
                on_the_way.append(action)
                if reader.get(way := (rank, action.op)) == action:
                    del reader[way]
        sends: list[tuple[int, Action]] = []
        for rank, (stage, op, microbatch) in ready:
            if (direction := _WAY_OF.get(op)) is None:
                continue
            peer = stage + direction.step
            to = peer % num_ranks
            if 0 <= peer < num_stages and to != rank:  # a single rank sends nothing to itself
                sends.append((rank, Action(stage, direction.send, microbatch)))
                is_unread = (to, op) in reader
                if receives_late:
                    reader[to, op] = Action(peer, op, microbatch)
                receive = Action(peer, direction.receive, microbatch)
                needs.send(rank, receive)
                if is_unread or (kept == 1 and needs.latest(rank, to, 2 if in_pairs else 1)):
                    lowered[to].append(receive)
                    continue
                lowered[to].insert(last[to][0], receive)
                last[to] = deque((at + 1 for at in last[to]), kept)
        for rank, action in sends:
            lowered[rank].append(action)
        for rank, _ in ready:
            take_over(rank)
        running = [rank for rank in running if position[rank] < len(programs[rank])]
    return Plan(tuple(map(tuple, lowered)))


class _Needs:
    """Which computations a rank's latest result depends on: of each rank so many, its first."""

    def __init__(self, num_ranks: int) -> None:
        self._of_ranks = [[0] * num_ranks for _ in range(num_ranks)]
        self._of_messages: dict[Action, list[int]] = {}  # by receive, until they are read

    def compute(self, rank: int, action: Action) -> None:
        """Note a computation, which reads the message that its rank receives for it."""
        own = self._of_ranks[rank]
        if (way := _WAY_OF.get(action.op)) is not None:
            read = self._of_messages.pop(Action(action.stage, way.receive, action.microbatch), own)
            own[:] = map(max, own, read)
        own[rank] += 1

    def send(self, rank: int, receive: Action) -> None:
        """Note that a rank's latest result is sent."""
        self._of_messages[receive] = self._of_ranks[rank].copy()

    def latest(self, rank: int, other: int, count: int) -> bool:
        """Return True if a rank's latest result depends on any of another's latest ``count``."""
        return self._of_ranks[rank][other] > max(0, self._of_ranks[other][other] - count)


class _Arrived:
    """The set of arrived results, with one byte for each, since plans have a million results."""

    def __init__(self, plan: Plan) -> None:
        self.num_stages, self.num_microbatches = plan.num_stages, plan.num_microbatches
        self.there = {op: bytearray(self.num_stages * self.num_microbatches) for op in _WAY_OF}

    def add(self, action: Action) -> None:
        """Note that the result of a computation has arrived, if the computation sends one."""
        stage, op, microbatch = action
        if op in _WAY_OF:
            self.there[op][stage * self.num_microbatches + (microbatch or 0)] = True

    def allow(self, action: Action) -> bool:
        """Return True if the input of a computation has arrived; its program orders other needs."""
        stage, op, microbatch = action
        if (way := _WAY_OF.get(op)) is None:
            return True
        source = stage - way.step
        if not 0 <= source < self.num_stages:
            return True
        return bool(self.there[op][source * self.num_microbatches + (microbatch or 0)])
