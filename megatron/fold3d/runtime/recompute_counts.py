"""``--recompute-layers``: a number of recomputed layers for each stage.

In each forward, Megatron reads this number from the configuration of a model chunk's transformer
block. So each block gets a copy of the configuration with its own number.
"""

import copy
from collections.abc import Sequence

from megatron.core.transformer.transformer_block import TransformerBlock

from megatron.fold3d.runtime.feature import Feature, Iteration


class RecomputeCounts(Feature):
    """Sets the number of layers that each model chunk recomputes, in the first iteration.

    Args:
        counts: the number of each stage, for the stages of all ranks.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self._counts = tuple(counts)
        self._is_set = False

    def prepare(self, iteration: Iteration) -> None:
        """Give each transformer block its number.

        Raises:
            ValueError: a stage has fewer layers than it should recompute.
        """
        if self._is_set:
            return
        self._is_set = True
        for stage, blocks in blocks_of(iteration).items():
            for block in blocks:
                count, layers = self._counts[stage], len(block.layers)
                if count > layers:
                    raise ValueError(
                        f"--recompute-layers: {count} layers of stage {stage} are to be "
                        f"recomputed, and it has {layers}; give at most as many"
                    )
                recompute_first(block, count)


def blocks_of(iteration: Iteration) -> dict[int, list[TransformerBlock]]:
    """Return the transformer blocks of each of this rank's stages."""
    return {
        segment * iteration.plan.num_ranks + iteration.rank: [
            block for block in chunk.modules() if isinstance(block, TransformerBlock)
        ]
        for segment, chunk in enumerate(iteration.chunks)
    }


def recompute_first(block: TransformerBlock, count: int) -> None:
    """Let a block's first ``count`` layers be recomputed from its next forward on."""
    block.config = copy.copy(block.config)
    block.config.recompute_num_layers = count
