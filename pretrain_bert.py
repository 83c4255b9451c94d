r"""Train a BERT: Megatron's model, data and loop, under a schedule of fold3d.

    torchrun --nproc-per-node 4 pretrain_bert.py --device cpu --schedule aiao --segments 2 \
        --pipeline-model-parallel-size 2 --num-layers 8 --hidden-size 64 ... --data-path DATA

The processes that write checkpoints import this file again, which is why it imports Megatron late.
"""

import sys
from collections.abc import Sequence

from megatron.fold3d.training import leaving
from megatron.fold3d.training.launch import train


def main(argv: Sequence[str]) -> int:
    """Train as the flags say; returns the exit code."""
    return train(argv, "bert")


if __name__ == "__main__":
    leaving.run(main, sys.argv[1:])
if __name__ == "__mp_main__":  # in a process that writes checkpoints
    leaving.end_with_parent()
