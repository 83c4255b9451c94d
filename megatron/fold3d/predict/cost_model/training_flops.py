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
    if counts:
        each = zip(recomputed_flops(shape, "full", split), shape.stage_layers(split), strict=True)
        again = sum(
            flops * count / max(1, len(layers))
            for (flops, layers), count in zip(each, counts, strict=True)
        )
    else:
        again = float(sum(recomputed_flops(shape, recompute, split)))
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
