"""The loop of each stage: plans with two actions swapped are refused exactly if they cannot run.

What runs is said here once more, in the plainest way: actions change the state of their stage.
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random

import pytest

from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.ir import WHOLE, Action, Op, Plan, PlanError
from megatron.fold3d.plan.ops import P2P_OPS, PEER, RECV_OPS, SEND_OPS, WAYS
from megatron.fold3d.plan.passes.offload import OffloadChoice
from megatron.fold3d.plan.schedules import ONE_SEGMENT_SCHEDULES, SPLIT_SCHEDULES
from megatron.fold3d.plan.verify import verify
from tests.plans import built, planned


@dataclass
class Loop:
    """A stage since its last step; ``ran`` is of this iteration."""

    computed: int = 0
    summed: int = 0
    gradients: set[int | None] = field(default_factory=set)
    is_finalized: bool = False
    ran: set[tuple[Op, int | None]] = field(default_factory=set)


class Player:
    """Plays a plan, iteration after iteration."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._has = {a for program in plan.programs for a in program}
        self._ops = {(a.stage, a.op) for a in self._has}
        self._loops: dict[int, Loop] = defaultdict(Loop)
        self._sent: set[Action] = set()  # in this iteration
        self._posted: dict[tuple[int, Op], deque[Action]] = defaultdict(deque)
        self._carries = {way.compute: way.compute for way in WAYS}  # what brings its result
        if plan.has(*P2P_OPS):
            self._carries = {way.compute: way.send for way in WAYS}

    def can_run(self) -> bool:
        for program in self._plan.programs:  # whatever comes before the first step
            for action in program:
                self._run(action)
        return all(self._iteration() for _ in range(2))

    def _iteration(self) -> bool:
        for loop in self._loops.values():
            loop.ran = set()
        self._sent = set()
        self._posted.clear()
        left = [list(reversed(program)) for program in self._plan.programs]
        moved = True
        while moved:
            moved = False
            for program in left:
                while program and self._is_ready(program[-1]):
                    self._run(program.pop())
                    moved = True
        return not any(left)

    def _run(self, action: Action) -> None:
        stage, op, number = action
        loop = self._loops[stage]
        loop.ran.add((op, number))
        self._sent.add(action)
        if op in RECV_OPS:
            self._posted[stage % self._plan.num_ranks, op].append(action)
        elif op in SEND_OPS and (channel := self._channel(action)):
            channel.popleft()
        elif op is Op.STEP:
            freeable = {(Op.STEP, None), (Op.REDUCE_SCATTER, WHOLE)}
            self._loops[stage] = Loop(ran=loop.ran & freeable)
        elif op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER):
            loop.summed = action.end
            if action.end == WHOLE:
                loop.ran.add((op, WHOLE))
        elif op is Op.WEIGHT_PART:
            loop.computed = action.end
        elif op is Op.FINALIZE:
            loop.is_finalized = True
        elif op is (Op.WEIGHT if (stage, Op.WEIGHT) in self._ops else Op.BACKWARD):
            loop.gradients.add(number)

    def _is_ready(self, action: Action) -> bool:
        stage, op, number = action
        loop, microbatches = self._loops[stage], range(self._plan.num_microbatches)
        all_gradients = len(loop.gradients) == len(microbatches)

        def ran(op: Op, number: int | None = None) -> bool:
            return (op, number) in loop.ran

        def ran_if_any(op: Op, number: int | None = None) -> bool:
            return Action(stage, op, number) not in self._has or ran(op, number)

        def ran_all(op: Op) -> bool:
            return all(ran_if_any(op, m) for m in microbatches)

        match op:
            case Op.FORWARD:
                in_order = number == 0 or ran(Op.FORWARD, (number or 0) - 1)
                arrived = stage == 0 or Action(stage - 1, self._carries[op], number) in self._sent
                return in_order and arrived and ran_if_any(Op.ALL_GATHER)
            case Op.BACKWARD | Op.RECOMPUTE:
                ready = ran(Op.FORWARD, number) and ran_if_any(Op.ALL_GATHER_B)
                ready &= ran_if_any(Op.RELOAD, number)
                if op is Op.RECOMPUTE:
                    return ready and not ran(Op.BACKWARD, number)
                is_last = stage == self._plan.num_stages - 1
                arrived = is_last or Action(stage + 1, self._carries[op], number) in self._sent
                freed = not loop.summed and ran_if_any(Op.RECOMPUTE, number)
                if Action(stage, Op.FREE_GRAD) in self._has and self._is_carried(stage):
                    freed &= ran(Op.FREE_GRAD)
                return ready and arrived and freed
            case Op.RECV_F | Op.RECV_B:
                return True
            case Op.SEND_F | Op.SEND_B:  # blocks until its receive is posted
                channel = self._channel(action)
                receive = (stage + PEER[op], Op.RECV_F if op is Op.SEND_F else Op.RECV_B, number)
                there = bool(channel) and channel[0] == receive
                return there and ran(Op.FORWARD if op is Op.SEND_F else Op.BACKWARD, number)
            case Op.WEIGHT:
                return ran(Op.BACKWARD, number) and not loop.summed
            case Op.WEIGHT_PART:
                return all_gradients and ran_all(Op.BACKWARD) and action.end > loop.computed
            case Op.ALL_REDUCE | Op.REDUCE_SCATTER:
                computed = (stage, Op.WEIGHT_PART) not in self._ops or action.end <= loop.computed
                return all_gradients and computed and action.end > loop.summed
            case Op.REDUCE_KEPT:
                computed = (stage, Op.WEIGHT_PART) not in self._ops or loop.computed == WHOLE
                return self._is_carried(stage) and ran_all(self._last(stage)) and computed
            case Op.FINALIZE:
                return ran(Op.REDUCE_KEPT)
            case Op.STEP:
                is_carried = not ran(Op.FORWARD, 0)
                return loop.summed == WHOLE and loop.is_finalized == is_carried
            case Op.ALL_GATHER:
                return not self._is_carried(stage) or ran(Op.STEP)
            case Op.FREE_PARAM:
                return ran(Op.ALL_GATHER) and ran_all(Op.FORWARD)
            case Op.ALL_GATHER_B:
                return ran(Op.FREE_PARAM)
            case Op.FREE_PARAM_B:
                return ran(Op.ALL_GATHER) and ran_all(Op.BACKWARD) and ran_all(Op.RECOMPUTE)
            case Op.FREE_GRAD:
                is_carried = self._is_carried(stage)
                return ran(Op.STEP) if is_carried else ran(Op.REDUCE_SCATTER, WHOLE)
            case Op.OFFLOAD:
                return ran(Op.FORWARD, number)
            case _:
                return ran(Op.OFFLOAD, number)

    def _channel(self, send: Action) -> deque[Action]:
        """What a rank has posted to receive from the one that sends."""
        to = send.stage + PEER[send.op]
        receive = Op.RECV_F if send.op is Op.SEND_F else Op.RECV_B
        return self._posted[to % self._plan.num_ranks, receive]

    def _is_carried(self, stage: int) -> bool:
        program = self._plan.programs[stage % self._plan.num_ranks]
        ops = [a.op for a in program if a.stage == stage and a.op in (Op.STEP, Op.FORWARD)]
        return ops[0] is Op.STEP

    def _last(self, stage: int) -> Op:
        return Op.WEIGHT if (stage, Op.WEIGHT) in self._ops else Op.BACKWARD


def plans(random: Random, count: int) -> Iterator[Plan]:
    for _ in range(count):
        schedule = random.choice(("aiao", "interleaved", "afab", "1f1b", "zb-h1"))
        ranks = random.randint(1, 3)
        segments = 1 if schedule in ONE_SEGMENT_SCHEDULES else random.randint(1, 3)
        order = built(schedule, ranks, segments, random.randint(2, 4))
        choice = Choice.plain("plan", segments)
        sums = random.choice(("whole", "shards", "gathers", "parameters"))
        some = [segment for segment in range(segments) if random.random() < 0.5]
        if schedule not in SPLIT_SCHEDULES:
            choice = choice.changed((0,), wgrad=random.choice(("backward", "behind", "last")))
        choice = choice.changed(some if random.random() < 0.3 else (), recompute="early")
        if sums == "gathers":
            choice = choice.changed(random.choice(((), some)), optimizer="replicated")
        choice = choice.changed(random.choice(((), None, some)), step="next")
        yield planned(
            order,
            replace(choice, slices=random.random() < 0.3),
            transfers=False,
            steps_shards=sums == "shards",
            gathers_params=sums == "gathers",
            shards=random.choice(("weights", "gradients")) if sums == "parameters" else "off",
            reduces_early=random.random() < 0.5,
            shares=tuple(random.choice((0.0, 0.4, 1.0)) for _ in range(order.num_stages)),
            offload=random.choice((None, OffloadChoice())),
        )


def refusal(plan: Plan) -> PlanError | None:
    try:
        verify(plan)
    except PlanError as error:
        return error
    return None


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_with_two_actions_swapped_is_refused_exactly_if_it_cannot_run(seed: int):
    random = Random(seed)
    for plan in plans(random, 8):
        verify(plan)
        assert Player(plan).can_run()
        for _ in range(10):
            programs = [list(program) for program in plan.programs]
            program = random.choice(programs)
            i, j = random.randrange(len(program)), random.randrange(len(program))
            program[i], program[j] = program[j], program[i]
            swapped = Plan(tuple(map(tuple, programs)))
            runs = Player(swapped).can_run()
            assert (refusal(swapped) is None) == runs, f"{refusal(swapped)}\n{swapped.to_text()}"
