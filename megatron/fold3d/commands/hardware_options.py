"""The options that name a model and a cluster, and what they stand for."""

from argparse import ArgumentParser, Namespace
from dataclasses import replace
from math import inf

from megatron.fold3d.commands.hardware_flags import add_hardware_flags
from megatron.fold3d.predict.cost_model.cluster import NODES, Cluster, cluster
from megatron.fold3d.predict.cost_model.model_shape import SHAPES, ModelShape, model_shape

MODELS, NODE_NAMES = ", ".join(SHAPES), ", ".join(NODES)


def add_hardware_options(
    parser: ArgumentParser, *, required: bool, model_required: bool | None = None
) -> None:
    """Add ``--model``, ``--cluster``, and what was measured of them."""
    add_hardware_flags(
        parser,
        required=required,
        model_required=model_required,
        models=MODELS,
        nodes=NODE_NAMES,
    )


def named_hardware(args: Namespace, shape: ModelShape | None = None) -> tuple[ModelShape, Cluster]:
    """Return the model, unless it is given, and the cluster of ``args``.

    Raises:
        ValueError: there is none of this name, or a number of it cannot be.
    """
    shape, found = shape or model_shape(args.model), cluster(args.cluster)
    if (layer_s := args.layer_forward_s) is not None:
        if not 0 < layer_s < inf:
            raise ValueError(f"--layer-forward-s {layer_s}: give seconds above zero")
        flops_per_s = shape.layer_flops(0) / layer_s / found.compute_efficiency
        found = replace(
            found, gpu_flops_per_s=flops_per_s, memory_bytes_per_s=0.0, layer_efficiencies=()
        )
    for name in ("task_overhead_s", "iteration_overhead_s", "straggler_sigma"):
        if (value := getattr(args, name)) is not None:
            found = replace(found, **{name: value})
    return shape, found
