"""A model of which every stage recomputes its own number of layers: what fits, costs and bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron.fold3d.observe.memory_curve import Footprint
from megatron.fold3d.plan.ir import Plan, Program
from megatron.fold3d.plan.memory import peak_recomputed
from megatron.fold3d.plan.ops import WEIGHT_OPS
from megatron.fold3d.plan.passes.recompute import recomputed
from megatron.fold3d.policy.recompute_choice import (
    LayerBytes,
    StageBytes,
    fewest_counts,
    kept_layers,
    most_live,
)
from megatron.fold3d.predict.cost_model.estimate import Estimate
from megatron.fold3d.predict.cost_model.model_shape import ModelShape
from megatron.fold3d.predict.cost_model.sizes import Setup, layer_bytes
from megatron.fold3d.predict.simulator.costs import Costs


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
        plan: the plan that runs.
        shape: the model.
        setup: how it is trained, with full recomputation.
        footprint: the memory that the setup takes.
        usable_bytes: usable memory of a GPU.
        split: layers of each stage; if empty, all have equally many.

    Raises:
        ValueError: a rank does not fit with all layers recomputed.
    """
    layers = [len(of_stage) for of_stage in shape.stage_layers(split or plan.num_stages)]
    counts = list(layers)
    early = any(map(recomputed, plan.programs))
    for rank, program in enumerate(plan.programs):
        stages = range(rank, plan.num_stages, plan.num_ranks)
        choose = _with_early if early and not plan.has(*WEIGHT_OPS) else _in_backwards
        each = {stage: layers[stage] for stage in stages}
        try:
            found = choose(program, each, shape, setup, footprint, rank, usable_bytes)
        except ValueError as error:
            raise ValueError(f"rank {rank}: {error}") from None
        for stage in stages:
            counts[stage] = found[stage]
    return tuple(counts)


def _in_backwards(
    program: Program,
    layers: Mapping[int, int],
    shape: ModelShape,
    setup: Setup,
    footprint: Footprint,
    rank: int,
    usable_bytes: float,
) -> Mapping[int, int]:
    """Return the fewest for a rank, each of which is recomputed in its backward."""
    each = layer_bytes(shape, setup, "full")
    (early,) = peak_recomputed(Plan((program,)))
    recomputed = footprint.recomputed_bytes or (0.0,) * len(footprint.saved_bytes)
    sizes = LayerBytes(
        static=footprint.static_bytes[rank],
        working=max(footprint.working_bytes[stage] for stage in layers)
        + early * max(recomputed[stage] for stage in layers),
        kept=layer_bytes(shape, setup, "none"),
        recomputed=each,
        limit=usable_bytes,
        beside={stage: footprint.saved_bytes[stage] - n * each for stage, n in layers.items()},
    )
    kept = kept_layers(most_live(program), layers, sizes)
    return {stage: n - kept[stage] for stage, n in layers.items()}


def _with_early(
    program: Program,
    layers: Mapping[int, int],
    shape: ModelShape,
    setup: Setup,
    footprint: Footprint,
    rank: int,
    usable_bytes: float,
) -> Mapping[int, int]:
    """Return the fewest for a rank, some of which are there again from an `R` until a backward."""
    extra = layer_bytes(shape, setup, "none") - layer_bytes(shape, setup, "full")
    working = max(footprint.working_bytes[stage] for stage in layers)
    stages = {
        stage: StageBytes(layers=n, recomputed=footprint.saved_bytes[stage], kept=extra)
        for stage, n in layers.items()
    }
    limit = usable_bytes - footprint.static_bytes[rank] - working
    return fewest_counts(program, stages, limit).recomputed


def estimate_with_counts(
    known: Estimate,
    shape: ModelShape,
    setup: Setup,
    counts: Sequence[int],
    split: Sequence[int] = (),
) -> Estimate:
    """Return an estimate for stages that recompute ``counts`` layers; without numbers as it is.

    Here and below ``split`` is the layers of each stage; if empty, all have equally many.
    """
    if not counts:
        return known
    return replace(
        known,
        costs=costs_with_counts(known.costs, shape, counts, split),
        footprint=footprint_with_counts(known.footprint, shape, setup, counts, split),
    )


def costs_with_counts(
    costs: Costs, shape: ModelShape, counts: Sequence[int], split: Sequence[int] = ()
) -> Costs:
    """Return the costs of full recomputation for stages that recompute ``counts`` layers."""
    layers = [len(of_stage) for of_stage in shape.stage_layers(split or len(counts))]
    rows = zip(costs.backward_s, costs.recompute_s, counts, layers, strict=True)
    shares = [(b, r, n / all_layers if all_layers else 0.0) for b, r, n, all_layers in rows]
    return replace(
        costs,
        backward_s=tuple(b - r * (1 - share) for b, r, share in shares),
        recompute_s=tuple(r * share for _, r, share in shares),
    )


def footprint_with_counts(
    footprint: Footprint,
    shape: ModelShape,
    setup: Setup,
    counts: Sequence[int],
    split: Sequence[int] = (),
) -> Footprint:
    """Return the bytes of full recomputation for stages that recompute ``counts`` layers."""
    layers = [len(of_stage) for of_stage in shape.stage_layers(split or len(counts))]
    extra = layer_bytes(shape, setup, "none") - layer_bytes(shape, setup, "full")
    kept = [all_layers - n for all_layers, n in zip(layers, counts, strict=True)]
    rows = list(zip(counts, layers, strict=True))
    return replace(
        footprint,
        saved_bytes=tuple(b + n * extra for b, n in zip(footprint.saved_bytes, kept, strict=True)),
        working_bytes=tuple(
            b if n else 0.0 for b, n in zip(footprint.working_bytes, counts, strict=True)
        ),
        recomputed_bytes=tuple(
            b * n / all_layers if all_layers else 0.0
            for b, (n, all_layers) in zip(footprint.recomputed_bytes, rows, strict=True)
        ),
    )
