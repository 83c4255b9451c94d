"""The number of layers that each stage has to recompute to fit into memory."""

from collections.abc import Sequence

from megatron.fold3d.observe.memory_curve import Footprint
from megatron.fold3d.plan.ir import Op, Plan
from megatron.fold3d.plan.memory import peak_recomputed
from megatron.fold3d.plan.ops import WEIGHT_OPS
from megatron.fold3d.policy.recompute_choice import StageBytes, fewest_counts
from megatron.fold3d.predict.cost_model.model_shape import ModelShape
from megatron.fold3d.predict.cost_model.sizes import Setup, layer_bytes


def fewest_recomputed(
    plan: Plan,
    shape: ModelShape,
    setup: Setup,
    footprint: Footprint,
    usable_bytes: float,
    split: Sequence[int] = (),
) -> tuple[int, ...]:
    """Return the fewest layers of each stage to recompute so that every rank fits into memory.

    Args:
        setup: the training setup, with full recomputation.
        split: layers of each stage; if empty, all have equally many.

    Raises:
        ValueError: a rank does not fit with all layers recomputed.
    """
    layers = [len(of_stage) for of_stage in shape.stage_layers(split or plan.num_stages)]
    counts = list(layers)
    extra = layer_bytes(shape, setup, "none") - layer_bytes(shape, setup, "full")
    is_split = plan.has(*WEIGHT_OPS)
    early = peak_recomputed(plan)
    for rank, program in enumerate(plan.programs):
        stages = {
            s: StageBytes(layers=layers[s], recomputed=footprint.saved_bytes[s], kept=extra)
            for s in range(rank, plan.num_stages, plan.num_ranks)
        }
        beside = footprint.static_bytes[rank] + max(footprint.working_bytes[s] for s in stages)
        if is_split:  # a separate recomputation holds memory as if no layer was kept
            program = tuple(action for action in program if action.op is not Op.RECOMPUTE)
            if footprint.recomputed_bytes:
                beside += early[rank] * max(footprint.recomputed_bytes[s] for s in stages)
        try:
            found = fewest_counts(
                *(program, stages, usable_bytes),
                beside=beside,
                in_backwards=any(early) and not is_split,
            )
        except ValueError as error:
            raise ValueError(f"rank {rank}: {error}") from None
        for stage, count in found.recomputed.items():
            counts[stage] = count
    return tuple(counts)
