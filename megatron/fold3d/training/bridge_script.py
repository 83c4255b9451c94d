"""The function that a script of Megatron-Bridge calls, under its name in `megatron.fold3d`.

Bridge's ``pretrain`` completes its configuration before it makes process groups. Right behind that
the schedule is installed, by the same rules as for flags.
"""

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import fold3d_patches
from fold3d_patches import bridge_config
from fold3d_patches.registry import apply
from megatron.fold3d.config.all_flags import megatron_defaults
from megatron.fold3d.config.bridge_config import read_bridge
from megatron.fold3d.config.spelling import flag_of, typed
from megatron.fold3d.plan.schedule_word import AUTO
from megatron.fold3d.training import launch
from megatron.fold3d.training.own_script import refused, refusing
from megatron.fold3d.upstream.pretrain import default_flags


def bridge(**flags: Any) -> ExitStack:
    """Patch Megatron for each ``pretrain`` and ``finetune`` of Megatron-Bridge that follows.

    Args:
        flags: those of `add_arguments` by their attributes: ``schedule="aiao", segments=2``.

    Returns:
        A stack that removes the patches when it closes, at the latest when the process ends.

    Raises:
        SystemExit: the flags cannot work; the exit code is 2.
    """
    with refusing() as patched:
        args = _parsed(flags)
        patched.enter_context(fold3d_patches.install_platform(args.device))
        schedule = patched.enter_context(ExitStack())

        def update(upstream: Callable[[Any], None], config: Any) -> None:
            schedule.close()  # of an earlier call
            with refused():
                _set_up(config, args)
            upstream(config)
            with refused():
                complete = read_bridge(config, args)
                launch.check(complete)
                launch.install(complete, schedule)
            config.ddp.align_param_gather = complete.align_param_gather

        patched.enter_context(apply([*bridge_config.patches(update)]))
    return patched


def _set_up(config: Any, args: Namespace) -> None:
    """Set what our flags stand for, as Megatron's parser does."""
    launch.refuse_problems(_problems(config))
    defaults = megatron_defaults(read_bridge(config, args))
    if (segments := defaults.pop("num_virtual_stages_per_pipeline_rank", 1)) > 1:
        config.model.virtual_pipeline_model_parallel_size = segments
    for name, value in defaults.items():
        setattr(config.model, name, value)


def _parsed(flags: dict[str, Any]) -> Namespace:
    """Return the defaults of Megatron's flags, and ours as given.

    Raises:
        ValueError: there is no such flag, or Bridge cannot have it.
    """
    asked = {flag_of(name): value for name, value in flags.items() if value not in (None, False)}
    words = " ".join(typed(flag, value) for flag, value in asked.items())
    own = launch.with_ours(ArgumentParser(add_help=False, allow_abbrev=False))
    args = own.parse_args(words.split())
    late = {
        "check=: it is for flags; drop it": args.check is not None,
        "model_preset=: it stands for flags; set the model in the configuration": args.model_preset,
        'segments="auto": it measures a model of flags; give a number': args.segments == AUTO,
    }
    launch.refuse_problems(problem for problem, there in late.items() if there)
    sizes = {"rank": os.environ.get("RANK", 0), "world_size": os.environ.get("WORLD_SIZE", 1)}
    given = vars(args) | {name: int(number) for name, number in sizes.items()}
    return Namespace(**vars(default_flags()) | given)


def _problems(config: Any) -> Iterator[str]:
    """Yield one message (found, rule, fix) per choice that no flag of Megatron's could make."""
    model, fix = config.model, "drop it, or drop fold3d.bridge"
    several = getattr(getattr(model, "dist_train", None), "use_dist_train", False)
    if several or not hasattr(model, "pipeline_model_parallel_size"):
        yield f"a model of several modules: Bridge trains it by a schedule of its own; {fix}"
    if config.dist.use_decentralized_pg:
        yield f"use_decentralized_pg: our groups are cut out of Megatron's own; {fix}"
