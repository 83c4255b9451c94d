"""From a command line to a patched Megatron whose flags are valid.

Keeps one invariant: a mistake of the user's ends as one message from one rank and exit code 2,
before any process group exists; whatever goes wrong later keeps its traceback.
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

import torch
from megatron.training.arguments import parse_and_validate_args, parse_args

import fold3d_patches
from fold3d_patches.cpu.flags import FLAGS as CPU_FLAGS
from megatron.fold3d.config import Fold3DConfig, add_arguments, megatron_defaults

# What Megatron and its tokenizers raise about flags, files and packages.
MISTAKES = (ValueError, AssertionError, RuntimeError, OSError, ImportError)


def prepare(argv: Sequence[str], patched: ExitStack) -> Namespace:
    """Check the flags in ``argv`` and patch Megatron until ``patched`` closes.

    Raises:
        MISTAKES: about what the user gave; see `refuse`.
    """
    if not _is_first():
        warnings.simplefilter("ignore")  # every rank would say the same
    ours = _add_arguments(ArgumentParser(add_help=False, allow_abbrev=False))
    device = ours.parse_known_args(argv)[0].device
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no CUDA device here; try --device cpu")
    sys.argv[1:] = [*CPU_FLAGS, *argv] if device == "cpu" else argv  # where Megatron reads it
    args: Namespace = parse_args(_add_arguments)
    patched.enter_context(fold3d_patches.install(Fold3DConfig.from_args(args)))
    args = parse_and_validate_args(_add_arguments, args_defaults=megatron_defaults(args))
    Fold3DConfig.from_args(args)  # validation may bring options along, from a checkpoint say
    return args


def refuse(error: Exception) -> int:
    """Say on one rank of a node what the mistake is; returns the exit code."""
    if _is_first():
        for line in _reason(error).splitlines():
            sys.stderr.write(f"{Path(sys.argv[0]).name}: error: {line}\n")
    return 2


def _is_first() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"  # torchrun's, before there is any group


def _add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add our flags, and raise where argparse would print its usage on every rank and exit."""

    def error(message: str) -> NoReturn:
        raise ValueError(message)

    parser.error = error  # type: ignore[method-assign]
    return add_arguments(parser)


def _reason(error: Exception) -> str:
    """Return the message, or the failed assertion's own text where Megatron gives no message."""
    if str(error):
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    lines = linecache.getlines(frame.filename)[(frame.lineno or 1) - 1 : frame.end_lineno]
    return " ".join("".join(lines).split())
