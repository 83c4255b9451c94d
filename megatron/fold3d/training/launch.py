"""From a command line to a patched Megatron whose flags are valid, and to training with it.

Keeps one invariant: a user's mistake ends the run with one message and exit code 2, before any
process group exists. Later errors keep their traceback. Megatron, which takes seconds to import, is
imported only if our own flags are right.
"""

import io
import logging
import os
import re
import sys
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import fold3d_patches
from fold3d_patches.cpu import flags as cpu_flags
from fold3d_patches.registry import apply, check_version
from megatron.fold3d.config.all_flags import add_arguments, megatron_defaults
from megatron.fold3d.config.gpu_settings import (
    BLACKWELL,
    FUSION_KERNEL,
    MOST_CONNECTIONS,
    default_flags,
    delta_library_problems,
    gpu_problems,
    has_many_queues,
)
from megatron.fold3d.config.job_sizes import num_microbatches, recomputed_layers, stage_layers
from megatron.fold3d.config.read_config import read_config
from megatron.fold3d.config.run_flags import run_problems
from megatron.fold3d.config.schedule_flags import word_of
from megatron.fold3d.plan.schedule_word import AUTO, STOCK
from megatron.fold3d.training.mistakes import MISTAKES, refuse, script, speaks
from megatron.fold3d.upstream.pretrain import parse_and_validate_args, pretraining

if TYPE_CHECKING:
    from megatron.fold3d.observe.breakdown import Flops
    from megatron.fold3d.predict.cost_model.model_shape import Family

AddArguments = Callable[[ArgumentParser], ArgumentParser]


logger = logging.getLogger(__name__)


def train(argv: Sequence[str], family: Literal["gpt", "bert"]) -> int:
    """Train a model of the family as the flags say; returns the exit code."""
    with ExitStack() as patched:
        try:
            with held_log():
                args = prepare(argv, patched, family)

                from megatron.fold3d.training.pretraining import absent_packages

                model = import_module(f"megatron.fold3d.training.{family}")
                model.check(args)
                if args.load is not None:
                    from megatron.fold3d.training.checkpoint_fit import check_checkpoint

                    check_checkpoint(args)
                config = model.config(args)
                if args.check is None:  # another machine may have what these flags need
                    run = pretraining(args, config, model.build_datasets, model.forward_step)
            if args.check is not None:
                return tell_checked(args, [*absent_packages(args)])
        except MISTAKES as error:
            return refuse(error)
        run()
    return 0


@contextmanager
def held_log() -> Iterator[None]:
    """Hold back what Megatron prints until a run can begin; a mistake is then all that is printed.

    Before it trains, Megatron prints 850 lines of flags.
    """
    held = io.StringIO()
    try:
        with redirect_stdout(held):
            yield
    except MISTAKES:
        held.truncate(0)
        raise
    finally:
        sys.stdout.write(held.getvalue())
        for handler in logging.getLogger().handlers:  # Megatron makes one as it is imported
            if isinstance(handler, logging.StreamHandler) and handler.stream is held:
                handler.setStream(sys.stdout)


def prepare(
    argv: Sequence[str],
    patched: ExitStack,
    family: "Family",
    *,
    extra_args_provider: AddArguments | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    ignore_unknown_args: bool = False,
    builds_own_model: bool = False,
) -> Namespace:
    """Check the flags and patch Megatron until ``patched`` closes; returns Megatron's namespace.

    Args:
        patched: the stack that receives the patches' exit callbacks.
        extra_args_provider: this and the next two are as of `own_script.parse_args`.
        builds_own_model: whether the script's model is not known to be Megatron's.

    Raises:
        MISTAKES: the user's input is wrong; pass the error to `refuse`.
    """
    ours = with_ours(ArgumentParser(add_help=False, allow_abbrev=False))
    own = ours.parse_known_args(argv)[0]
    device = own.device
    preset: Sequence[str] = ()
    if own.model_preset:
        from megatron.fold3d.predict.cost_model.presets import preset_flags

        preset = preset_flags(own.model_preset, family)
    checks = own.check is not None
    _quiet(device, checks=checks)

    check_version()
    import torch

    from fold3d_patches.cpu.compiler import uncompiled

    with uncompiled() if device == "cpu" or checks else nullcontext():
        if checks:
            from fold3d_patches.cpu.device import absent_gpu
            from megatron.fold3d.predict.cost_model.cluster import cluster
            from megatron.fold3d.training import dry_run

            known = cluster(own.check) if own.check else None
        from megatron.training.arguments import parse_args

    asks_for_help = not {"-h", "--help"}.isdisjoint(argv)
    lacks_gpu = device == "cuda" and not torch.cuda.is_available()
    if lacks_gpu and not checks and not asks_for_help:
        raise ValueError(
            "--device cuda: torch finds no CUDA device; --device cpu and --check need none"
        )
    on_cpu = device == "cpu"
    # Where Megatron reads them. The user's words come last, and win.
    assumed = cpu_flags.FLAGS if on_cpu else default_flags()
    sys.argv[1:] = [*assumed, *preset, *argv]
    if assumed and not on_cpu:
        logger.info(
            "%s: there is neither Transformer Engine nor %s, of NVIDIA's apex",
            *(" ".join(assumed), FUSION_KERNEL),
        )
    if preset:
        logger.info("--model-preset %s: %s", own.model_preset, " ".join(preset))
    add_all, defaults = partial(with_ours, more=extra_args_provider), dict(args_defaults or {})
    args: Namespace = parse_args(add_all, ignore_unknown_args)
    vars(args).update(
        {name: value for name, value in defaults.items() if getattr(args, name, None) is None}
    )
    if on_cpu:
        cpu_flags.check(args)
    if checks:
        dry_run.set_world_size(args, known)
    check(args, run_problems(args))
    if args.segments == AUTO:
        from megatron.fold3d.training.auto_segments import choose_segments

        sys.argv += choose_segments(args, sys.argv[1:], defaults, builds_own_model=builds_own_model)
        args = parse_args(add_all, ignore_unknown_args)
        read_config(args)
    patched.enter_context(fold3d_patches.install_platform(device))
    if checks and lacks_gpu:
        is_blackwell = known is not None and known.is_blackwell  # unknown GPUs count as older
        has_engine = args.transformer_impl == "transformer_engine"  # or the answer says otherwise
        patched.enter_context(apply(absent_gpu(is_blackwell, has_engine=has_engine)))
    with nullcontext() if not checks else redirect_stdout(io.StringIO()):  # 800 lines of flags
        args = parse_and_validate_args(
            add_all, ignore_unknown_args, defaults | megatron_defaults(args)
        )
    if not on_cpu and has_many_queues():
        _put_tensor_parallel_first(args)
    # Once more: validation may bring options along, from a checkpoint say.
    if not checks:
        install(args, patched)
    return args


def _put_tensor_parallel_first(args: Namespace) -> None:
    """Give tensor-parallel collectives streams of high priority, where Megatron asserts one queue.

    One queue would keep the order in which Megatron's layers launch a collective and the matmul
    that hides it. The user's own choice of streams stays.

    Raises:
        ValueError: a flag cannot work without that order.
    """
    import torch

    splits = args.tensor_model_parallel_size > 1 or args.context_parallel_size > 1
    if not splits or torch.cuda.get_device_properties(0).major >= BLACKWELL:
        return
    queues = f"CUDA_DEVICE_MAX_CONNECTIONS={MOST_CONNECTIONS}"
    if args.tp_comm_overlap:
        raise ValueError(
            f"--tp-comm-overlap with {queues}: before Blackwell its kernels need the order of one "
            "hardware queue; drop --tp-comm-overlap, or give CUDA_DEVICE_MAX_CONNECTIONS=1"
        )
    args.high_priority_stream_groups = args.high_priority_stream_groups or ["tp"]
    if speaks():
        logger.info(
            "%s: a layer's collective may start behind the weight gradient that would hide it, "
            "where 1 starts it first; high-priority streams: %s",
            *(queues, " ".join(args.high_priority_stream_groups)),
        )


def install(args: Namespace, patched: ExitStack) -> None:
    """Patch the schedule of validated flags into Megatron until ``patched`` closes.

    Raises:
        MISTAKES: the user's input is wrong; pass the error to `refuse`.
    """
    config = read_config(args)
    if config.trace is not None:
        model, hardware = _microbatch_flops(args)
        config = replace(config, microbatch_flops=model, recomputed_flops=hardware - model)
    if config.choice.order != STOCK:
        args.align_param_gather = args.overlap_param_gather  # hooks start none: see the plan
    patched.enter_context(
        fold3d_patches.install_schedule(config, num_microbatches(args), _ranks_here(args))
    )
    if "MASTER_ADDR" not in os.environ:
        raise ValueError(f"no torchrun; start with: torchrun --nproc-per-node N {script()} ...")


def tell_checked(args: Namespace, absent: Sequence[str] = ()) -> int:
    """Print what ``--check`` found out about a run that can begin; returns the exit code.

    Args:
        absent: what this machine lacks and the ranks must have, one message each.

    Raises:
        MISTAKES: the run cannot begin; pass the error to `refuse`.
    """
    from megatron.fold3d.training.dry_run import report

    config = read_config(args)
    plan = fold3d_patches.check_schedule(config, num_microbatches(args))
    lines = [*report(args, config, plan)]
    lines += (f"not on this machine: {message}" for message in absent)
    if speaks():
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()
    return 0


def check(args: Namespace, others: Iterable[str] = ()) -> None:
    """Refuse parsed flags that cannot work.

    Args:
        others: further problems, one line each.

    Raises:
        ValueError: one line for each rule that is broken.
    """
    problems = [
        *others,
        *gpu_problems(args, word_of(args).order),
        *delta_library_problems(args),
    ]
    try:
        config = read_config(args)
    except ValueError as error:
        problems = [str(error), *problems]
    refuse_problems(problems)
    if config.plan_file and not args.use_checkpoint_args:  # it may bring the sizes
        fold3d_patches.check_schedule(config, num_microbatches(args))


def refuse_problems(problems: Iterable[str]) -> None:
    """Raise a ``ValueError`` if there are any problems, with a line for each."""
    if lines := [*problems]:
        raise ValueError("\n".join(lines))


def _microbatch_flops(args: Namespace) -> "Flops":
    """Return the FLOPs of a forward and a backward; 0 for a model that the planner does not know.

    A vocabulary that only the tokenizer knows is such a case. What ``--recompute-layers auto``
    chooses later is not counted.
    """
    from megatron.fold3d.commands.megatron_flags import shape_of
    from megatron.fold3d.observe.breakdown import Flops
    from megatron.fold3d.predict.cost_model.training_flops import training_flops

    if args.vocab_size:
        with suppress(ValueError):
            return training_flops(
                shape_of(args),
                args.recompute_granularity or "none",
                stage_layers(args),
                recomputed_layers(args),
            ).times(args.micro_batch_size)
    return Flops(0.0, 0.0)


def _ranks_here(args: Namespace) -> list[int]:
    """Pipeline ranks of this node's processes, by torchrun's numbers and Megatron's placement."""
    if "LOCAL_WORLD_SIZE" not in os.environ:
        return []
    rank, local_rank, here = (
        int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    first, num_ranks = rank - local_rank, args.pipeline_model_parallel_size
    of_one_rank = args.world_size // num_ranks
    if args.use_tp_pp_dp_mapping:
        of_one_rank = args.tensor_model_parallel_size * args.context_parallel_size
    return [number // of_one_rank % num_ranks for number in range(first, first + here)]


def with_ours(parser: ArgumentParser, more: AddArguments | None = None) -> ArgumentParser:
    """Add our flags and then more; raise where argparse would print on every rank and exit."""

    def error(message: str) -> NoReturn:
        words = message.removeprefix("unrecognized arguments: ").split()
        if words != message.split():
            from megatron.fold3d.commands.console import suggestion

            message += suggestion(words, parser._option_string_actions)
        raise ValueError(message)

    parser.error = error  # type: ignore[method-assign]
    for action in parser._actions:  # Megatron 0.19.2 has a bare "10%)", over which --help fails
        action.help = action.help and re.sub(r"%%|%(?!\()", "%%", action.help)
    parser = add_arguments(parser)
    return more(parser) if more else parser


def _quiet(device: str, *, checks: bool) -> None:
    """Silence messages that every rank would repeat, and those of others about this machine.

    The machine that checks a run's flags is not the one that trains.
    """
    if checks:
        warnings.simplefilter("ignore")
        for name in ("megatron", "fold3d_patches"):
            logging.getLogger(name).setLevel(logging.WARNING)
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    if not speaks():
        warnings.simplefilter("ignore")
        logging.getLogger("fold3d_patches").setLevel(logging.WARNING)
    if device == "cpu":
        warnings.filterwarnings("ignore", ".*(Apex|Transformer Engine|transformer-engine)")
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
