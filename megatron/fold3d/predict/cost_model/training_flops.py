"""The FLOPs of training: model FLOPs, and hardware FLOPs.

Model FLOPs are a forward, and a backward of twice the work. Hardware FLOPs add recomputed forwards,
as in the papers of Megatron and FOLD3D. As in these papers, attention's scores count in full.
Megatron's log reports model FLOPs with half of the scores of causal attention.
"""

from collections.abc import Sequence

from megatron.fold3d.observe.breakdown import Flops
from megatron.fold3d.predict.cost_model.model_shape import ModelShape, Split
from megatron.fold3d.predict.cost_model.sizes import Recompute


def training_flops(
    shape: ModelShape, recompute: Recompute, split: Split = 1, counts: Sequence[int] = ()
) -> Flops:
    """Return the model and hardware FLOPs of one sequence's forward and backward.

    Args:
        counts: numbers of layers that stages recompute; empty follows ``recompute`` for all layers.
    """
    model = float(3 * sum(shape.stage_flops(1)))
    flops = recomputed_flops(shape, recompute, split)
    shares = recomputed_shares(shape, split, counts)
    again = sum(share * each for share, each in zip(shares, flops, strict=True))
    return Flops(model, model + again)


def recomputed_flops(shape: ModelShape, recompute: Recompute, split: Split) -> list[int]:
    """Return, per stage, the FLOPs that a backward of one sequence recomputes.

    These are whole layers or, selectively, attention's scores; never embedding, head or loss.
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
    """Return, per stage, the share of its layers that ``counts`` recomputes; empty is all."""
    layers = shape.stage_layers(split)
    if not counts:
        return (1.0,) * len(layers)
    return tuple(n / max(1, len(of_stage)) for n, of_stage in zip(counts, layers, strict=True))
