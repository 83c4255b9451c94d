"""``--layers``: how many layers each stage of a model holds, given or chosen by simulation."""

from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from math import inf

from megatron.fold3d.commands.cost_options import Source, costs_of
from megatron.fold3d.commands.schedule_options import asks_to_choose
from megatron.fold3d.config.recompute_flags import counts_list
from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.plan.schedule_word import AUTO
from megatron.fold3d.policy.partition import Layers, best_partition
from megatron.fold3d.predict.search.rank_work import rank_times

_MOST_SIMULATED = 100


def layers_or_auto(text: str) -> tuple[int, ...] | str:
    """Read the value of ``--layers``: numbers of layers, or auto."""
    try:
        return text if text == AUTO else counts_list(text)
    except ArgumentTypeError:
        raise ArgumentTypeError(
            f"{text!r} is neither a list of numbers of layers such as 5,4,4,3 nor {AUTO}"
        ) from None


def with_chosen_layers(
    args: Namespace,
    plan: Plan,
    source: Source,
    judge: Callable[[Namespace], tuple[bool, float]],
) -> tuple[Namespace, str]:
    """Return the options with numbers for ``--layers auto``, and how these were found.

    Args:
        args: the options.
        plan: the plan that runs.
        source: costs of layers as even as possible.
        judge: tells whether a run with such options fits, and the seconds of its iteration.

    Raises:
        ValueError: another option needs the layers first.
    """
    assert source.hardware is not None
    shape, start = source.hardware.shape, source.hardware.layers
    of_one_split = (
        "--recompute-layers with numbers" if isinstance(args.recompute_layers, tuple) else "",
        "optimizer=" if args.replicate_optimizer else "",
        "ahead=auto or wgrad=gaps" if asks_to_choose(args) else "",
    )
    for found in filter(None, of_one_split):
        raise ValueError(
            f"--layers auto with {found}: that is for layers that are known; give numbers for "
            "--layers, or drop one of the two"
        )

    def given(layers: Layers) -> Namespace:
        return Namespace(**vars(args) | {"layers": layers})

    def iteration_s(layers: Layers) -> float:
        fits, seconds = judge(given(layers))
        return seconds if fits else inf

    times = None
    are_alike = len({*map(shape.layer_flops, range(shape.num_layers))}) == 1
    if are_alike and not args.overlap_tensor_parallel:  # a pair takes less than its halves
        times = rank_times(
            lambda layers: costs_of(given(layers), plan).costs,
            start,
            plan.num_ranks,
            plan.num_microbatches,
            may_keep_layers=args.recompute_layers is not None,
        )
    best = best_partition(
        start, iteration_s=iteration_s, times=times, most_simulated=_MOST_SIMULATED
    )
    how = "none is better" if best.is_exact else f"best of {best.simulated} tried"
    return given(best.layers), how
