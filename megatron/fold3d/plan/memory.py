"""What a plan holds at once: the table of ops says what each action takes and gives back.

==============  =====================================================  ===========
saved           what a forward keeps for its backward, on the device   micro-batch
recomputed      what an early recomputation holds for its backward     micro-batch
on_host         saved activations in host memory                       micro-batch
parameter       whole parameters                                       stage
gradient        whole gradients                                        stage
==============  =====================================================  ===========
"""

from collections import Counter, deque
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from megatron.fold3d.plan.ir import WHOLE, Op, Plan, Program, carried
from megatron.fold3d.plan.ops import COPY_OPS, FREE_OPS, TABLE
from megatron.fold3d.plan.passes.weight_grads import split_stages

_Held = tuple[int, int | None]
"""Stage and micro-batch of something in memory."""
Moment = tuple[int, tuple[int, ...]]
"""The segment of a running backward, and the micro-batches that each segment holds meanwhile."""


def peak_activations(plan: Plan, *, depth: int = 1) -> tuple[int, ...]:
    """Return, per rank, the most (segment, micro-batch) activations on the device at once.

    Paper eqs. 6-7 multiply this count by the bytes of one activation. An offloaded activation
    leaves the device after the rank's next ``depth`` computations, and is back when its RELOAD
    begins: see `add_offload`. If weight gradients are delayed, an activation stays until its weight
    gradients are computed.
    """
    return tuple(_peak(program, "saved", depth=depth) for program in plan.programs)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSizes:
    """The memory that a micro-batch of each stage holds and the limit of each rank, in any unit."""

    saved: tuple[float, ...]
    """By stage, from a forward until its backward."""
    delayed: tuple[float, ...]
    """By stage, from a backward until its weight gradients."""
    most: tuple[float, ...]
    """By rank."""

    @classmethod
    def counted(cls, plan: Plan, most: int | None = None) -> "HeldSizes":
        """Count micro-batches; each counts in full until its weight gradients are computed.

        Args:
            most: the limit of any rank; None is the fullest rank's peak with whole backwards.
        """
        if most is None:
            most = max(peak_activations(plan.select({Op.FORWARD, Op.BACKWARD})))
        ones = (1.0,) * plan.num_stages
        return cls(saved=ones, delayed=ones, most=(float(most),) * plan.num_ranks)

    def peaks(self, plan: Plan) -> list[float]:
        """Return the most that each rank of a plan holds at once."""
        from megatron.fold3d.plan.parts import part_begins

        peaks = []
        for program in plan.programs:
            split = split_stages(program)
            now = peak = 0.0
            begins = part_begins(program) if split else {}
            for action in program:
                stage, op, _ = action
                if op is Op.FORWARD:
                    now += self.saved[stage]
                elif op is Op.BACKWARD:
                    now += (self.delayed[stage] if stage in split else 0.0) - self.saved[stage]
                elif op is Op.WEIGHT:
                    now -= self.delayed[stage]
                elif op is Op.WEIGHT_PART:
                    part = (action.end - begins[action]) / WHOLE
                    now -= plan.num_microbatches * part * self.delayed[stage]
                peak = max(peak, now)
            peaks.append(peak)
        return peaks


def fullest(program: Program, num_ranks: int, num_segments: int) -> tuple[Moment, ...]:
    """Return what a rank holds while backwards run, without moments that hold less of each segment.

    Between two backwards a rank holds no more than while the second runs. So one of the returned
    moments has the most bytes, whatever the bytes of a micro-batch in each segment are.
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

    From its `R` until its backward, each holds as much as a forward without recomputation.
    """
    return tuple(_peak(program, "recomputed") for program in plan.programs)


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
            parameters[stage] = parameter_bytes[stage]  # for the optimizer's step as well
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
    """Return, for each size, the most activations of that size in host memory at once.

    An activation counts from its OFFLOAD until its backward, by which its RELOAD has ended. Stages
    that are not in ``bytes_of_stage`` do not count.
    """
    peaks: Counter[int] = Counter()
    for size in set(bytes_of_stage.values()):
        stages = {stage for stage, own in bytes_of_stage.items() if own == size}
        peaks[size] = _peak(program, "on_host", stages)
    return +peaks


def _has_any(program: Program, ops: Iterable[Op]) -> bool:
    return not {op for _, op, _ in program}.isdisjoint(ops)


def _peak(
    program: Program,
    what: str,
    stages: Container[int] | None = None,
    *,
    depth: int = 1,
) -> int:
    """Return the most micro-batches for which a rank holds ``what`` at once, in these stages.

    An action takes memory when it begins, and gives memory back when it ends. A copy frees memory
    ``depth`` computations later.
    """
    now = peak = 0
    split = split_stages(program) if what == "saved" else frozenset()
    held: Counter[_Held] = Counter()
    in_parts: dict[int, int] = {}  # by stage, the micro-batches of its parts
    leaving: deque[list[_Held]] = deque([] for _ in range(depth))
    for action in program:
        row = TABLE[action.op]
        mine = action.stage, action.microbatch
        taken = [mine] if row.takes == what else []
        held.update(taken)
        given = [mine] if what in row.gives else []
        if action.op is Op.BACKWARD and action.stage in split:  # its weight gradients still read it
            given = []
        elif action.op is Op.WEIGHT_PART:  # a part of every micro-batch counts like some whole ones
            own = [each for each in held if each[0] == action.stage and held[each]]
            whole = in_parts.setdefault(action.stage, len(own))
            left = whole - whole * action.end // WHOLE
            given = own[: len(own) - left] if what in row.gives else []
        if action.op in COPY_OPS:
            leaving[-1] += given
            given = []
        elif action.op is Op.FORWARD or action.op is Op.BACKWARD:
            given += leaving.popleft()
            leaving.append([])
        given = [each for each in given if held[each]]
        held.subtract(given)
        if taken or given:
            now += sum(stages is None or stage in stages for stage, _ in taken)
            peak = max(peak, now)
            now -= sum(stages is None or stage in stages for stage, _ in given)
    return peak
