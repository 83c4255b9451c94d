r"""Train a GPT: Megatron's flags, loop, data and checkpoints, under a schedule of fold3d.

    torchrun --nproc-per-node 4 pretrain_gpt.py --device cpu --schedule aiao --segments 2 \
        --pipeline-model-parallel-size 2 --num-layers 8 --hidden-size 64 ... --mock-data

The processes that write checkpoints import this file again, which is why it imports Megatron late.
"""

import sys
from collections.abc import Sequence

from megatron.fold3d.training import leaving
from megatron.fold3d.training.launch import train


def main(argv: Sequence[str]) -> int:
    """Train as the flags say; returns the exit code."""
    return train(argv, "gpt")


if __name__ == "__main__":
    leaving.run(main, sys.argv[1:])
if __name__ == "__mp_main__":  # in a process that writes checkpoints
    leaving.end_with_parent()
