"""A model of which every stage recomputes its own number of layers: what fits, costs and bytes."""

from collections.abc import Sequence
from dataclasses import replace

from megatron.fold3d.observe.memory_curve import Footprint
from megatron.fold3d.plan.ir import Op, Plan
from megatron.fold3d.plan.memory import peak_recomputed
from megatron.fold3d.plan.ops import WEIGHT_OPS
from megatron.fold3d.policy.recompute_choice import StageBytes, fewest_counts
from megatron.fold3d.predict.cost_model.estimate import Estimate
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
    """Return how many layers of each stage are recomputed at least, so that every rank fits.

    Args:
        setup: how it is trained, with full recomputation.
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
        if is_split:  # what is recomputed early counts as if no layer was kept
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


def estimate_with_counts(
    known: Estimate,
    shape: ModelShape,
    setup: Setup,
    counts: Sequence[int],
    split: Sequence[int] = (),
) -> Estimate:
    """Return an estimate of full recomputation for stages that recompute ``counts`` layers.

    Args:
        known: the estimate if all layers are recomputed.
        counts: of each stage; without numbers the estimate stays as it is.
        split: layers of each stage; if empty, all have equally many.
    """
    if not counts:
        return known
    costs, footprint = known.costs, known.footprint
    layers = [len(of_stage) for of_stage in shape.stage_layers(split or len(counts))]
    shares = [n / of_stage if of_stage else 0.0 for n, of_stage in zip(counts, layers, strict=True)]
    kept = [of_stage - n for of_stage, n in zip(layers, counts, strict=True)]
    extra = layer_bytes(shape, setup, "none") - layer_bytes(shape, setup, "full")
    again_s = costs.recompute_s
    return replace(
        known,
        costs=replace(
            costs,
            backward_s=tuple(
                b - r * (1 - share)
                for b, r, share in zip(costs.backward_s, again_s, shares, strict=True)
            ),
            recompute_s=tuple(r * share for r, share in zip(again_s, shares, strict=True)),
        ),
        footprint=replace(
            footprint,
            saved_bytes=tuple(
                b + n * extra for b, n in zip(footprint.saved_bytes, kept, strict=True)
            ),
            working_bytes=tuple(
                b if n else 0.0 for b, n in zip(footprint.working_bytes, counts, strict=True)
            ),
            recomputed_bytes=tuple(
                b * n / of_stage if of_stage else 0.0
                for b, n, of_stage in zip(footprint.recomputed_bytes, counts, layers, strict=True)
            ),
        ),
    )
