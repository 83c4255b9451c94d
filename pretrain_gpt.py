r"""Train a GPT: Megatron's flags, loop, data and checkpoints, under a schedule of fold3d.

    torchrun --nproc-per-node 4 pretrain_gpt.py --device cpu --schedule aiao --segments 2 \
        --pipeline-model-parallel-size 2 --num-layers 8 --hidden-size 64 ... --mock-data

A mistake of the user's ends as one message and exit code 2, before any process group exists;
whatever goes wrong later keeps its traceback. Megatron, which takes seconds to import, is imported
only where our own flags are right.
"""

import linecache
import os
import sys
import traceback
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import fold3d_patches
from fold3d_patches.cpu.flags import FLAGS as CPU_FLAGS
from megatron.fold3d.config import Fold3DConfig, add_arguments, megatron_defaults

# What Megatron, its tokenizers and our patches raise about flags, files and packages.
MISTAKES = (ValueError, AssertionError, RuntimeError, OSError, ImportError)


def add_our_flags(parser: ArgumentParser) -> ArgumentParser:
    """Add our flags, and raise where argparse would print its usage on every rank and exit."""

    def error(message: str) -> NoReturn:
        raise ValueError(message)

    parser.error = error  # type: ignore[method-assign]
    return add_arguments(parser)


def patch_and_parse(argv: Sequence[str], patched: ExitStack) -> Namespace:
    """Check the flags and patch Megatron until ``patched`` closes; returns Megatron's namespace."""
    ours = add_our_flags(ArgumentParser(add_help=False, allow_abbrev=False))
    device = ours.parse_known_args(argv)[0].device

    import torch
    from megatron.training.arguments import parse_and_validate_args, parse_args

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no CUDA device; --device cpu needs none")
    sys.argv[1:] = [*CPU_FLAGS, *argv] if device == "cpu" else argv  # where Megatron reads it
    args: Namespace = parse_args(add_our_flags)
    patched.enter_context(fold3d_patches.install(Fold3DConfig.from_args(args)))
    args = parse_and_validate_args(add_our_flags, args_defaults=megatron_defaults(args))
    Fold3DConfig.from_args(args)  # validation may bring options along, from a checkpoint say
    return args


def reason(error: Exception) -> str:
    """Return the error's message; where an assertion has none, the assertion."""
    if str(error):
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    lines = linecache.getlines(frame.filename)[(frame.lineno or 1) - 1 : frame.end_lineno]
    return " ".join("".join(lines).split())


def main(argv: Sequence[str]) -> int:
    """Train as the flags say; returns the exit code."""
    speaks = os.environ.get("LOCAL_RANK", "0") == "0"  # torchrun's: there is no group yet
    if not speaks:
        warnings.simplefilter("ignore")  # every rank would say the same
    with ExitStack() as patched:
        try:
            args = patch_and_parse(argv, patched)

            from megatron.core.enums import ModelType
            from megatron.training import pretrain
            from megatron.training.argument_utils import (
                gpt_config_from_args,
                pretrain_cfg_container_from_args,
            )

            from fold3d_patches import gpt

            gpt.check_data(args)
            config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
        except MISTAKES as error:
            for line in reason(error).splitlines() if speaks else ():
                print(f"{Path(__file__).name}: error: {line}", file=sys.stderr)
            return 2
        pretrain(config, gpt.build_datasets, ModelType.encoder_or_decoder, gpt.forward_step)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
