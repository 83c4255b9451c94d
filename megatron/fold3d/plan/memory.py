"""The memory that a plan holds: the table of ops names what each action takes and gives back.

==============  =====================================================  ===========
saved           activations from a forward until its backward          micro-batch
delayed         operands from a backward until its weight gradients    micro-batch
working         activations of a layer while a backward recomputes it  micro-batch
recomputed      activations from an early R until its backward         micro-batch
on_host         saved activations in host memory                       micro-batch
parameter       whole parameters                                       stage
gradient        whole gradients                                        stage
==============  =====================================================  ===========

Only `changes` counts micro-batches along a program. Plans, traces and simulated iterations multiply
these counts by bytes.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil

from megatron.fold3d.plan.ir import WHOLE, Action, Op, Plan, Program, carried
from megatron.fold3d.plan.ops import COPY_OPS, FREE_OPS, TABLE
from megatron.fold3d.plan.passes.recompute import recomputed
from megatron.fold3d.plan.passes.weight_grads import split_stages

Change = tuple[str, int, float]
"""A word of the table above, a stage, and the number of micro-batches that are added."""
Moment = tuple[int, tuple[int, ...]]
"""The segment of a running backward, and the micro-batches that each segment holds meanwhile."""
_PER_MICROBATCH = frozenset({"saved", "delayed", "recomputed", "on_host"})
_LEAST = 1e-6  # micro-batches; smaller remainders are rounding errors


def changes(
    program: Program, num_microbatches: int
) -> Iterator[tuple[Action, list[Change], list[Change]]]:
    """Yield each action with the changes at its beginning, and at its end."""
    split, done = split_stages(program), defaultdict[int, int](int)  # by stage, the last part's end
    away = {(stage, m) for stage, op, m in program if op is Op.OFFLOAD}
    some = {"recomputed": recomputed(program), "on_host": away}
    for action in program:
        stage, op, microbatch = action
        row, mine = TABLE[op], (stage, microbatch)
        begin: list[Change] = [(row.takes, stage, 1)] if row.takes in _PER_MICROBATCH else []
        given = (what for what in row.gives if what in _PER_MICROBATCH)
        end: list[Change] = [(w, stage, -1) for w in given if w not in some or mine in some[w]]
        if op is Op.BACKWARD:
            if stage in split:  # weight gradients still read the operands
                end.append(("delayed", stage, 1))
            if mine not in some["recomputed"]:
                begin.append(("working", stage, 1))
                end.append(("working", stage, -1))
        elif op is Op.WEIGHT_PART:  # frees a part of each micro-batch; `done` begins again at zero
            part = action.end - done[stage] % WHOLE
            end = [("delayed", stage, -num_microbatches * part / WHOLE)]
            done[stage] = action.end
        yield action, begin, end


def peak(
    program: Program,
    num_microbatches: int,
    sizes: Mapping[str, Callable[[int], float]],
    *,
    depth: int = 1,
) -> float:
    """Return the most that a rank holds at once, in the unit of ``sizes``.

    Args:
        sizes: by word of the table, the size of a stage's micro-batch; missing words count nothing.
        depth: the number of computations after which a copy has freed memory.
    """

    def weigh(some: Iterable[Change]) -> float:
        return sum(n * sizes[what](stage) for what, stage, n in some if what in sizes)

    now = most = 0.0
    leaving: deque[list[Change]] = deque([] for _ in range(depth))
    for action, begin, end in changes(program, num_microbatches):
        now += weigh(begin)
        most = max(most, now)
        if action.op in COPY_OPS:
            leaving[-1] += end
            continue
        now += weigh(end)
        if action.op is Op.FORWARD or action.op is Op.BACKWARD:
            now += weigh(leaving.popleft())
            leaving.append([])
        most = max(most, now)
    return most


def peak_activations(plan: Plan, *, depth: int = 1) -> tuple[int, ...]:
    """Return, per rank, the most (segment, micro-batch) activations on the device at once.

    Paper eqs. 6-7 multiply this count by the bytes of one activation. An offloaded activation
    leaves the device after the rank's next ``depth`` computations, and is back when its RELOAD
    begins: see `add_offload`. If weight gradients are delayed, an activation stays until its weight
    gradients are computed; halves of two activations count as one.
    """
    sizes = dict.fromkeys(("saved", "delayed"), lambda stage: 1.0)
    peaks = (peak(p, plan.num_microbatches, sizes, depth=depth) for p in plan.programs)
    return tuple(ceil(most - _LEAST) for most in peaks)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSizes:
    """The memory that a micro-batch of each stage holds and the limit of each rank, in any unit."""

    saved: tuple[float, ...]
    """By stage, memory from a forward until its backward."""
    delayed: tuple[float, ...]
    """By stage, memory from a backward until its weight gradients."""
    most: tuple[float, ...]
    """By rank, the limit."""

    @classmethod
    def counted(cls, plan: Plan, most: int | None = None) -> "HeldSizes":
        """Return sizes that count micro-batches, each as 1 until its weight gradients are computed.

        Args:
            most: the limit of each rank; None is the fullest rank's peak with whole backwards.
        """
        if most is None:
            most = max(peak_activations(plan.select({Op.FORWARD, Op.BACKWARD})))
        ones = (1.0,) * plan.num_stages
        return cls(saved=ones, delayed=ones, most=(float(most),) * plan.num_ranks)

    def peaks(self, plan: Plan) -> list[float]:
        """Return the peak of each rank of a plan, in the unit of the sizes."""
        sizes = {"saved": self.saved.__getitem__, "delayed": self.delayed.__getitem__}
        return [peak(program, plan.num_microbatches, sizes) for program in plan.programs]


def fullest(program: Program, num_ranks: int, num_segments: int) -> tuple[Moment, ...]:
    """Return the moments at which a rank may hold most, for any bytes of each segment.

    Between two backwards a rank holds no more than while the second runs. So moments are backwards,
    except those at which another moment holds at least as many micro-batches of each segment.
    """
    moments: dict[int, set[tuple[int, ...]]] = {}
    held = [0] * num_segments
    for stage, op, _ in program:
        segment = stage // num_ranks
        if op is Op.FORWARD:
            held[segment] += 1
        elif op is Op.BACKWARD:
            moments.setdefault(segment, set()).add(tuple(held))
            held[segment] -= 1
    return tuple(
        (segment, counts)
        for segment, found in moments.items()
        for counts in found
        if not any(
            counts != other and all(a <= b for a, b in zip(counts, other, strict=True))
            for other in found
        )
    )


def peak_recomputed(plan: Plan) -> tuple[int, ...]:
    """Return, per rank, the most early recomputations that are held at once.

    From its `R` until its backward, a recomputation holds as much as a forward that keeps all.
    """
    one = {"recomputed": lambda stage: 1.0}
    return tuple(int(peak(program, plan.num_microbatches, one)) for program in plan.programs)


def peak_resident(
    program: Program,
    parameter_bytes: Mapping[int, float],
    gradient_bytes: Mapping[int, float],
    replicas: int,
) -> float:
    """Return the most bytes of parameters and gradients that a rank holds at once in an iteration.

    Args:
        parameter_bytes: by stage of the rank, the bytes of its whole parameters.
        gradient_bytes: by stage of the rank, the bytes of its whole gradients.
        replicas: the number of replicas that a stage is sharded over.
    """
    late = carried(program)
    shared = replicas if _has_any(program, FREE_OPS) else 1
    parameters = {stage: size / shared for stage, size in parameter_bytes.items()}
    gradients = {**gradient_bytes}
    if _has_any(program, {Op.FREE_GRAD}):
        gradients |= dict.fromkeys(gradient_bytes.keys() - late.keys(), 0.0)
    peak = sum(parameters.values()) + sum(gradients.values())
    for stage, op, _ in program:
        row = TABLE[op]
        if row.takes == "parameter" or (op is Op.STEP and stage in late):
            parameters[stage] = parameter_bytes[stage]  # the optimizer's step needs them whole too
        elif row.takes == "gradient":
            gradients[stage] = gradients[stage] or gradient_bytes[stage]
        elif "parameter" in row.gives:
            parameters[stage] = parameter_bytes[stage] / replicas
        elif "gradient" in row.gives:
            gradients[stage] = 0.0 if stage in late else gradient_bytes[stage] / replicas
        else:
            continue
        peak = max(peak, sum(parameters.values()) + sum(gradients.values()))
    return peak


def peak_on_host(program: Program, bytes_of_stage: Mapping[int, int]) -> Counter[int]:
    """Return, for each size in bytes, the most activations of this size in host memory at once.

    An activation counts from its OFFLOAD until its backward, when its RELOAD has ended. Stages that
    are not in ``bytes_of_stage`` do not count.
    """

    def most(size: int) -> int:
        held = {"on_host": lambda stage: float(bytes_of_stage.get(stage) == size)}
        return int(peak(program, 0, held))

    return +Counter({size: most(size) for size in set(bytes_of_stage.values())})


def _has_any(program: Program, ops: Iterable[Op]) -> bool:
    return not {op for _, op, _ in program}.isdisjoint(ops)
