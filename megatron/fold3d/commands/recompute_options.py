"""``--recompute-layers``: how many layers each stage recomputes, given or the fewest that fit."""

from argparse import Namespace
from dataclasses import replace
from operator import gt

from megatron.fold3d.commands.cost_options import Source
from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.plan.schedule_word import AUTO
from megatron.fold3d.predict.cost_model.recompute_by_stage import (
    costs_with_counts,
    fewest_recomputed,
    footprint_with_counts,
)


def with_recompute_counts(
    args: Namespace, source: Source, plan: Plan
) -> tuple[Source, tuple[int, ...] | None]:
    """Return costs with a number of recomputed layers for each stage, and the numbers if asked.

    Raises:
        ValueError: the numbers do not fit the model, or no number fits the memory.
    """
    hardware, given = source.hardware, args.recompute_layers
    if given is None:
        return source, None
    found = given if given == AUTO else ",".join(map(str, given))
    if hardware is None or hardware.setup.recompute != "full":
        raise ValueError(
            f"--recompute-layers {found}: it is for a model whose layers are recomputed; give "
            "--model and --cluster with --recompute full"
        )
    shape, setup, footprint = hardware.shape, hardware.setup, hardware.footprint
    if args.forwards_ahead == AUTO and given == AUTO:
        raise ValueError(
            "--recompute-layers auto with ahead=auto: how many forwards run ahead "
            "decides what fits; give a number for one of the two"
        )
    layers = hardware.layers
    if given == AUTO:
        counts = fewest_recomputed(plan, shape, setup, footprint, hardware.usable_bytes, layers)
    else:
        counts = given
        if len(counts) != plan.num_stages or any(map(gt, counts, layers)):
            raise ValueError(
                f"--recompute-layers {found}: a plan of {plan.num_stages} stages needs as many "
                f"numbers, and stages have {','.join(map(str, layers))} layers; give such"
            )
    footprint = footprint_with_counts(footprint, shape, setup, counts, layers)
    hardware = replace(hardware, footprint=footprint)
    costs = costs_with_counts(source.costs, shape, counts, layers)
    return replace(source, costs=costs, hardware=hardware), counts
