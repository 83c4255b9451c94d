"""How many activations a plan holds at once, on the device and on the host."""

from collections import Counter, deque
from collections.abc import Mapping

from megatron.fold3d.plan.ir import Op, Plan, Program
from megatron.fold3d.plan.passes.weight_grads import split_stages


def peak_activations(plan: Plan, *, depth: int = 1) -> tuple[int, ...]:
    """Return, per rank, the most (segment, micro-batch) activations on the device at once.

    Paper eqs. 6-7 multiply this count by the bytes of one. An offloaded activation leaves the
    device when the rank's next ``depth`` computations are over, and is back from its RELOAD on: see
    `add_offload`. One whose weight gradients are delayed stays until these are computed.
    """
    peaks = []
    for program in plan.programs:
        split = split_stages(program)
        held = peak = 0
        leaving = deque([0] * depth)  # by the computation before which they began to leave
        for stage, op, _ in program:
            if op is Op.FORWARD or op is Op.RELOAD:
                held += 1
                peak = max(peak, held)
            elif op is Op.OFFLOAD:
                leaving[-1] += 1
            if op is Op.FORWARD or op is Op.BACKWARD:
                held -= leaving.popleft() + (op is Op.BACKWARD and stage not in split)
                leaving.append(0)
            elif op is Op.WEIGHT:
                held -= 1
        peaks.append(peak)
    return tuple(peaks)


def peak_recomputed(plan: Plan) -> tuple[int, ...]:
    """Return, per rank, the most (segment, micro-batch) recomputed and not used yet, at once.

    Each holds what a forward without recomputation keeps, from its `R` until its backward.
    """
    peaks = []
    for program in plan.programs:
        waiting: set[tuple[int, int | None]] = set()
        peak = 0
        for stage, op, microbatch in program:
            if op is Op.RECOMPUTE:
                waiting.add((stage, microbatch))
                peak = max(peak, len(waiting))
            elif op is Op.BACKWARD:
                waiting.discard((stage, microbatch))
        peaks.append(peak)
    return tuple(peaks)


def peak_on_host(program: Program, bytes_of_stage: Mapping[int, int]) -> Counter[int]:
    """Return, for each size, the most activations of that size in host memory at once.

    They are counted from their OFFLOAD until their backward, by which their RELOAD has ended.
    Stages that are not in ``bytes_of_stage`` do not count.
    """
    now: Counter[int] = Counter()
    peak: Counter[int] = Counter()
    away = set()
    for stage, op, microbatch in program:
        if stage not in bytes_of_stage:
            continue
        size = bytes_of_stage[stage]
        if op is Op.OFFLOAD:
            away.add((stage, microbatch))
            now[size] += 1
            peak[size] = max(peak[size], now[size])
        elif op is Op.BACKWARD and (stage, microbatch) in away:
            now[size] -= 1
    return peak
