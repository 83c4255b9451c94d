r"""Train a GPT: Megatron's flags, loop, data and checkpoints, under a schedule of fold3d.

    torchrun --nproc-per-node 4 pretrain_gpt.py --device cpu --schedule aiao --segments 2 \
        --pipeline-model-parallel-size 2 --num-layers 8 --hidden-size 64 ... --mock-data

The processes that write checkpoints import this file again, which is why it imports Megatron late.
"""

import sys
from collections.abc import Sequence
from contextlib import ExitStack

from fold3d_patches.launch import MISTAKES, prepare, refuse


def main(argv: Sequence[str]) -> int:
    """Train as the flags say; returns the exit code."""
    with ExitStack() as patched:
        try:
            args = prepare(argv, patched)

            from megatron.core.enums import ModelType
            from megatron.training import pretrain
            from megatron.training.argument_utils import (
                gpt_config_from_args,
                pretrain_cfg_container_from_args,
            )

            from fold3d_patches import gpt

            gpt.check(args)
            config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
        except MISTAKES as error:
            return refuse(error)
        pretrain(config, gpt.build_datasets, ModelType.encoder_or_decoder, gpt.forward_step)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
