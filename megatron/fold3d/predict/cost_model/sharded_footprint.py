"""The memory of ``--shard-segments``: parameters and gradients are whole only while in use.

While activations are held, a rank holds at most the bytes of `peak_resident`. Afterwards all
parameters and gradients are whole again, for the optimizer's step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from megatron.fold3d.observe.memory_curve import Footprint
from megatron.fold3d.plan.compile import Job, Shards, lower
from megatron.fold3d.plan.ir import Plan, Program, carried
from megatron.fold3d.plan.memory import peak_resident
from megatron.fold3d.plan.ops import FREE_OPS, HOST_OPS
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.predict.cost_model.sizes import Setup

_FREE_GRADS = HOST_OPS - FREE_OPS


def sharded_footprint(
    footprint: Footprint, plan: Plan, gradient_bytes: Sequence[float], setup: Setup
) -> Footprint:
    """Return the footprint of a plan that frees parameters and, if it has FREE_GRAD, gradients."""
    late = frozenset().union(*map(_freed_late, plan.programs))
    return replace(
        footprint,
        static_bytes=tuple(
            static
            + _saving(
                tuple(a for a in program if a.op not in _FREE_GRADS or a.stage not in late),
                {s: gradient_bytes[s] for s in range(rank, plan.num_stages, plan.num_ranks)},
                setup,
            )
            for rank, (static, program) in enumerate(
                zip(footprint.static_bytes, plan.programs, strict=True)
            )
        ),
        freed_bytes=tuple(
            size if stage in late else 0.0 for stage, size in enumerate(gradient_bytes)
        ),
        step_bytes=footprint.static_bytes,
    )


def aiao_change(gradient_bytes: Sequence[float], setup: Setup, shards: Shards) -> float:
    """Return by how many bytes shards change a rank's static memory while AIAO computes."""
    if shards == "off":
        return 0.0
    plan = _plan_of_one_rank(len(gradient_bytes), shards)
    return _saving(plan.programs[0], dict(enumerate(gradient_bytes)), setup)


def _freed_late(program: Program) -> frozenset[int]:
    """Return the stages that free gradients of the previous iteration, before their forwards."""
    freed = {stage for stage, op, _ in program if op in _FREE_GRADS}
    return frozenset(carried(program).keys() & freed)


def _saving(program: Program, gradients: Mapping[int, float], setup: Setup) -> float:
    per_gradient = setup.element_bytes / setup.gradient_bytes
    parameters = {stage: size * per_gradient for stage, size in gradients.items()}
    whole = sum(gradients.values()) + sum(parameters.values())
    return peak_resident(program, parameters, gradients, setup.num_replicas) - whole


@lru_cache
def _plan_of_one_rank(num_segments: int, shards: Shards) -> Plan:
    """Return AIAO's plan on one rank; all ranks gather and free in the same order."""
    order = build("aiao", num_ranks=1, num_segments=num_segments, num_microbatches=1)
    return lower(Job.of(order, shards=shards))
