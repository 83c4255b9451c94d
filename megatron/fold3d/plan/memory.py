"""How many activations a plan holds at once on the device."""

from collections import deque

from megatron.fold3d.plan.ir import Op, Plan
from megatron.fold3d.plan.passes.weight_grads import split_stages


def peak_activations(plan: Plan, *, depth: int = 1) -> tuple[int, ...]:
    """Return, per rank, the most (segment, micro-batch) activations on the device at once.

    Paper eqs. 6-7 multiply this count by the bytes of one activation. An offloaded activation
    leaves the device after the rank's next ``depth`` computations, and is back from its RELOAD on:
    see `add_offload`. An activation stays until its weight gradients, if delayed, are computed.
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
