"""The FLOPs of training: those of the model, and those that GPUs compute.

The model's are a forward and a backward of twice the work. The hardware's have the forwards that
are recomputed too: the count of Megatron's papers, and of FOLD3D's. Attention counts in full, as
there. Megatron's log counts the model's, and half of the scores of causal attention.
"""

from collections.abc import Sequence

from megatron.fold3d.observe.breakdown import Flops
from megatron.fold3d.predict.cost_model.model_shape import ModelShape, Split
from megatron.fold3d.predict.cost_model.sizes import Recompute


def training_flops(
    shape: ModelShape, recompute: Recompute, split: Split = 1, counts: Sequence[int] = ()
) -> Flops:
    """Return the FLOPs of a sequence's forward and backward.

    Args:
        counts: how many layers each stage recomputes, if not what ``recompute`` says.
    """
    model = float(3 * sum(shape.stage_flops(1)))
    flops = recomputed_flops(shape, recompute, split)
    shares = recomputed_shares(shape, split, counts)
    again = sum(share * each for share, each in zip(shares, flops, strict=True))
    return Flops(model, model + again)


def recomputed_flops(shape: ModelShape, recompute: Recompute, split: Split) -> list[int]:
    """Return, per stage, what a backward of one sequence computes again.

    That is layers or, selectively, attention's scores. Embedding, head and loss never are.
    """

    def again(layer: int) -> int:
        if recompute == "none":
            return 0
        kept = shape.linear_flops(layer) if recompute == "selective" else 0
        return shape.layer_flops(layer) - kept

    return shape.by_stage(again, split)


def recomputed_shares(
    shape: ModelShape, split: Split, counts: Sequence[int] = ()
) -> tuple[float, ...]:
    """Return, per stage, the part of it that is recomputed of what would be without ``counts``."""
    layers = shape.stage_layers(split)
    if not counts:
        return (1.0,) * len(layers)
    return tuple(n / max(1, len(of_stage)) for n, of_stage in zip(counts, layers, strict=True))
