"""Whether a GPU has room for the layers that a measured choice would give its stages."""

import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace

import torch

from megatron.fold3d.commands.job import setup_of
from megatron.fold3d.commands.megatron_flags import shape_of
from megatron.fold3d.config.job_sizes import ranks_of_model
from megatron.fold3d.observe.memory_curve import memory
from megatron.fold3d.observe.timeline import Timeline
from megatron.fold3d.policy.partition import Layers
from megatron.fold3d.predict.cost_model.cluster import USABLE_MEMORY
from megatron.fold3d.predict.cost_model.estimate import footprint_of
from megatron.fold3d.runtime.device import device_bytes

Room = Callable[[Timeline, Layers, Layers], bool]


def room_for_layers(args: Namespace) -> Room | None:
    """Return a function that tells whether layers fit into memory, from formulas.

    A layout has room if its fullest rank holds no more than it would with layers as even as
    possible, or no more than is usable of a GPU. A CPU has room for all.

    Returns:
        A function of the simulated iterations, the layers of stages, and those that are as even as
        possible. None for a model whose bytes are not modelled.
    """
    total = device_bytes(torch.device(args.device))
    if total is None:
        return lambda *_: True
    if not args.vocab_size:  # only the tokenizer knows
        return None
    num_ranks: int = args.pipeline_model_parallel_size
    try:
        shape = shape_of(args)
        setup = setup_of(args, max(1, int(os.environ["WORLD_SIZE"]) // ranks_of_model(args)))
        setup.check(shape)
    except ValueError:
        return None
    if args.recompute_layers is not None:
        setup = replace(setup, recompute="full")
    elif args.recompute_activations and args.recompute_granularity is None:
        setup = replace(setup, recompute="selective")

    def has_room(timeline: Timeline, layers: Layers, even: Layers) -> bool:
        peak, of_even = (
            max(rank.device_peak for rank in memory(timeline, footprint))
            for footprint in (footprint_of(shape, setup, num_ranks, its) for its in (layers, even))
        )
        return peak <= max(of_even, USABLE_MEMORY * total)

    return has_room
