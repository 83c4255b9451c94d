"""Further peaks of a plan's memory: host memory, early recomputation, parameters, gradients."""

from collections import Counter
from collections.abc import Mapping

from megatron.fold3d.plan.ir import FREE_OPS, GATHER_OPS, Op, Plan, Program
from megatron.fold3d.plan.passes.grad_sync import deferred_stages


def peak_recomputed(plan: Plan) -> tuple[int, ...]:
    """Return, per rank, the most (segment, micro-batch) that are recomputed early at once.

    From its `R` until its backward, each holds as much as a forward without recomputation.
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


def peak_gathered(plan: Plan) -> tuple[int, ...]:
    """Return, per rank, the most stages whose parameters are whole on the device at once.

    They are whole from the start of their all-gather until they are freed, or always if the plan
    frees none. The optimizer's step, between two iterations, is not counted.
    """
    peaks = []
    for program in plan.programs:
        ops = {op for _, op, _ in program}
        if not ops & FREE_OPS:
            peaks.append(plan.num_segments)
            continue
        now = peak = 0
        for _, op, _ in program:
            now += (op in GATHER_OPS) - (op in FREE_OPS)
            peak = max(peak, now)
        peaks.append(peak)
    return tuple(peaks)


def peak_whole_grads(plan: Plan) -> tuple[int, ...]:
    """Return, per rank, the most stages whose gradients are whole on the device at once.

    They are whole from the stage's first backward until they are freed, possibly in the next
    iteration, or always if the plan frees none. `finalize_model_grads` and the optimizer's step,
    between two iterations, are not counted.
    """
    peaks = []
    for program in plan.programs:
        if not any(op is Op.FREE_GRAD for _, op, _ in program):
            peaks.append(plan.num_segments)
            continue
        whole = set(deferred_stages(program))
        peak = len(whole)
        for stage, op, _ in program:
            if op is Op.BACKWARD:
                whole.add(stage)
                peak = max(peak, len(whole))
            elif op is Op.FREE_GRAD:
                whole.discard(stage)
        peaks.append(peak)
    return tuple(peaks)


def peak_resident(
    program: Program,
    parameter_bytes: Mapping[int, float],
    gradient_bytes: Mapping[int, float],
    replicas: int,
) -> float:
    """Return the most bytes of parameters and gradients that a rank holds at once in an iteration.

    Args:
        program: the program of the rank, with DP.sync.
        parameter_bytes: bytes of each of its stages' parameters, whole.
        gradient_bytes: bytes of each of its stages' gradients, whole.
        replicas: the number of replicas that a stage is sharded over.
    """
    ops = {op for _, op, _ in program}
    shared = replicas if ops & FREE_OPS else 1
    parameters = {stage: size / shared for stage, size in parameter_bytes.items()}
    deferred = deferred_stages(program)
    gradients = {**gradient_bytes}
    if Op.FREE_GRAD in ops:
        gradients |= dict.fromkeys(gradient_bytes.keys() - deferred, 0.0)
    peak = sum(parameters.values()) + sum(gradients.values())
    for stage, op, _ in program:
        if op in GATHER_OPS:
            parameters[stage] = parameter_bytes[stage]
        elif op in FREE_OPS:
            parameters[stage] = parameter_bytes[stage] / replicas
        elif op is Op.WAIT_GRAD and stage in deferred:  # and the optimizer's step, in whole buffers
            parameters[stage] = parameter_bytes[stage]
        elif op is Op.BACKWARD:
            if gradients[stage]:
                continue
            gradients[stage] = gradient_bytes[stage]
        elif op is Op.FREE_GRAD:
            gradients[stage] = 0.0 if stage in deferred else gradient_bytes[stage] / replicas
        else:
            continue
        peak = max(peak, sum(parameters.values()) + sum(gradients.values()))
    return peak


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
