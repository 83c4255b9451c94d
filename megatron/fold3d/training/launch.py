"""From a command line to a patched Megatron whose flags are valid, and to training with it.

Keeps one invariant: a mistake of the user's ends as one message and exit code 2, before any
process group exists; whatever goes wrong later keeps its traceback. Megatron, which takes seconds
to import, is imported only where our own flags are right.
"""

import json
import linecache
import logging
import os
import re
import sys
import time
import traceback
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Literal, NoReturn

import fold3d_patches
from fold3d_patches.cpu import flags as cpu_flags
from fold3d_patches.registry import check_version
from megatron.fold3d.config.fold3d_config import Fold3DConfig, add_arguments, megatron_defaults
from megatron.fold3d.config.run_flags import run_problems
from megatron.fold3d.config.segment_flags import AUTO
from megatron.fold3d.predict.cost_model.model_shape import Family
from megatron.fold3d.predict.cost_model.presets import preset_flags

PATIENCE_S = 10.0
# What Megatron, its tokenizers and our patches raise about flags, files and packages.
MISTAKES = (ValueError, AssertionError, RuntimeError, OSError, ImportError)

logger = logging.getLogger(__name__)


def train(argv: Sequence[str], family: Literal["gpt", "bert"]) -> int:
    """Train a model of the family as the flags say; returns the exit code."""
    with ExitStack() as patched:
        try:
            args = prepare(argv, patched, family)

            from megatron.core.enums import ModelType
            from megatron.training import pretrain
            from megatron.training.argument_utils import pretrain_cfg_container_from_args

            model = import_module(f"megatron.fold3d.training.{family}")
            model.check(args)
            config = pretrain_cfg_container_from_args(args, model.config(args))
        except MISTAKES as error:
            return refuse(error)
        pretrain(config, model.build_datasets, ModelType.encoder_or_decoder, model.forward_step)
    return 0


def prepare(argv: Sequence[str], patched: ExitStack, family: Family) -> Namespace:
    """Check the flags and patch Megatron until ``patched`` closes; returns Megatron's namespace.

    Args:
        argv: the user's words.
        patched: takes what undoes the patches.
        family: of the models that the calling script trains.

    Raises:
        MISTAKES: about what the user gave; hand them to `refuse`.
    """
    ours = _add_arguments(ArgumentParser(add_help=False, allow_abbrev=False))
    own = ours.parse_known_args(argv)[0]
    device = own.device
    preset = preset_flags(own.model_preset, family) if own.model_preset else ()
    _quiet(device)

    check_version()
    import torch
    from megatron.training.arguments import parse_and_validate_args, parse_args

    asks_for_help = not {"-h", "--help"}.isdisjoint(argv)
    if device == "cuda" and not torch.cuda.is_available() and not asks_for_help:
        raise ValueError("--device cuda: torch finds no CUDA device; --device cpu needs none")
    on_cpu = device == "cpu"
    # Where Megatron reads them. The user's words come last, and win.
    sys.argv[1:] = [*(cpu_flags.FLAGS if on_cpu else ()), *preset, *argv]
    if preset:
        logger.info("--model-preset %s: %s", own.model_preset, " ".join(preset))
    args: Namespace = parse_args(_add_arguments)
    if on_cpu:
        cpu_flags.check(args)
    _check(args)
    if args.segments == AUTO:
        args = _with_chosen_segments(args)
    patched.enter_context(fold3d_patches.install_platform(device))
    args = parse_and_validate_args(_add_arguments, args_defaults=megatron_defaults(args))
    # Once more: validation may bring options along, from a checkpoint say.
    config = Fold3DConfig.from_args(args)
    patched.enter_context(
        fold3d_patches.install_schedule(config, _num_microbatches(args), _ranks_here(args))
    )
    if "MASTER_ADDR" not in os.environ:
        raise ValueError(f"no torchrun; start with: torchrun --nproc-per-node N {_script()} ...")
    return args


def _check(args: Namespace) -> None:
    """Refuse what the parsed flags ask for and cannot get.

    Raises:
        ValueError: one line for each rule that is broken.
    """
    problems = [*run_problems(args)]
    try:
        Fold3DConfig.from_args(args)
    except ValueError as error:
        problems = [str(error), *problems]
    if problems:
        raise ValueError("\n".join(problems))


def refuse(error: Exception) -> int:
    """Print on one rank of each node what is wrong; returns the exit code.

    The launcher ends all ranks when the printing rank ends. A rank that is still there later has
    found what that one has not: Megatron checks some things on the last rank only.
    """
    if not _speaks():
        time.sleep(PATIENCE_S)
    lines = [
        line if line.startswith(" ") else f"{_script()}: error: {line}"  # rows of a plan's grid
        for line in _reason(error).splitlines()
    ]
    sys.stderr.write("\n".join((*lines, "")))
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # torchrun ends with a traceback of its own, and below it with what is in this file.
        report = {"message": "\n".join(lines), "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(file).write_text(json.dumps({"message": report}), encoding="utf-8")
    return 2


def _with_chosen_segments(args: Namespace) -> Namespace:
    """Return the namespace of the same command with a number for ``--segments auto``."""
    from megatron.training.arguments import parse_args

    from megatron.fold3d.training.choose_segments import choose_segments

    num_segments, reason = choose_segments(args, sys.argv[1:])
    if reason:
        sys.stderr.write(f"{_script()}: --segments auto: {reason}\n")
    sys.argv += ["--segments", str(num_segments)]
    args = parse_args(_add_arguments)
    Fold3DConfig.from_args(args)
    return args


def _num_microbatches(args: Namespace) -> int:
    """Micro-batches of an iteration, once ramp-up is over."""
    return int(args.global_batch_size // (args.micro_batch_size * args.data_parallel_size))


def _ranks_here(args: Namespace) -> list[int]:
    """Pipeline ranks of this node's processes, by torchrun's numbers and Megatron's placement."""
    if "LOCAL_WORLD_SIZE" not in os.environ:
        return []
    rank, local_rank, here = (
        int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    first, of_one_rank = rank - local_rank, args.world_size // args.pipeline_model_parallel_size
    return [number // of_one_rank for number in range(first, first + here)]


def _add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add our flags, and raise where argparse would print its usage on every rank and exit."""

    def error(message: str) -> NoReturn:
        words = message.removeprefix("unrecognized arguments: ").split()
        near = [get_close_matches(word, parser._option_string_actions, 1, 0.75) for word in words]
        if words != message.split() and (flags := [flag for found in near for flag in found]):
            message += f"; did you mean {', '.join(flags)}?"
        raise ValueError(message)

    parser.error = error  # type: ignore[method-assign]
    for action in parser._actions:  # Megatron 0.19.2 has a bare "10%)", over which --help fails
        action.help = action.help and re.sub(r"%%|%(?!\()", "%%", action.help)
    return add_arguments(parser)


def _quiet(device: str) -> None:
    """Silence messages that every rank would repeat, and warnings about an unwanted GPU."""
    if not _speaks():
        warnings.simplefilter("ignore")
        logging.getLogger("fold3d_patches").setLevel(logging.WARNING)
    if device == "cpu":
        warnings.filterwarnings("ignore", ".*(Apex|Transformer Engine|transformer-engine)")
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def _speaks() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"  # torchrun's: there is no group yet


def _script() -> str:
    return Path(sys.argv[0]).name


def _reason(error: Exception) -> str:
    """Return the error's message and notes; where an assertion has no message, the assertion."""
    if str(error):
        return "\n".join((str(error), *getattr(error, "__notes__", ())))
    frame = traceback.extract_tb(error.__traceback__)[-1]
    lines = linecache.getlines(frame.filename)[(frame.lineno or 1) - 1 : frame.end_lineno]
    demand = " ".join("".join(lines).split()).removeprefix("assert ")
    flags = re.sub(r"\bargs\.(\w+)", lambda found: "--" + found[1].replace("_", "-"), demand)
    return f"Megatron demands: {flags}"
