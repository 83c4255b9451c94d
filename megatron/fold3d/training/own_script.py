"""The functions that a user's Megatron script calls, under their names in `megatron.fold3d`.

Keeps one invariant: nothing is patched before one of these functions is called. The patches stay
until the process ends, or until the returned stack is closed. A user's mistake ends the script as
it does ours: with one message and exit code 2.
"""

import atexit
import sys
from argparse import ArgumentError, Namespace
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import fold3d_patches
from megatron.fold3d.config.all_flags import add_arguments
from megatron.fold3d.config.segment_flags import num_segments
from megatron.fold3d.config.spelling import flag_of, typed
from megatron.fold3d.plan.schedule_word import AUTO
from megatron.fold3d.training import launch, leaving
from megatron.fold3d.training.mistakes import MISTAKES, refuse

__all__ = ["add_arguments", "install", "parse_args"]


def parse_args(
    extra_args_provider: launch.AddArguments | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    *,
    ignore_unknown_args: bool = False,
) -> Namespace:
    """Parse ``sys.argv`` as Megatron's ``parse_and_validate_args``, and patch Megatron.

    Call it once, where the script called ``parse_and_validate_args``. The flags decide which
    patches are installed; without ``--schedule`` Megatron is unchanged. They stay until the process
    ends. A mistake in the flags is printed in one message. After a later failure, the last line
    names the rank that failed first.

    Args:
        extra_args_provider: adds the script's own flags to the parser and returns it.
        args_defaults: values of flags that are not given, by their attributes' names.
        ignore_unknown_args: whether to ignore unknown flags, so that the script can read them.

    Returns:
        Megatron's namespace, validated and set as its global arguments, with the flags of
        `add_arguments` in it.

    Raises:
        SystemExit: the flags cannot work; the exit code is 2.
    """
    with refusing() as patched:
        with launch.held_log():
            args = launch.prepare(
                sys.argv[1:],
                patched,
                "gpt",
                extra_args_provider=extra_args_provider,
                args_defaults=args_defaults,
                ignore_unknown_args=ignore_unknown_args,
                builds_own_model=True,
            )
        if args.check is not None:
            sys.exit(launch.tell_checked(args))
    return args


def install(args: Namespace) -> ExitStack:
    """Patch Megatron for flags that it has parsed with `add_arguments` and validated.

    This is for scripts that cannot use `parse_args`. Flags that have to be known before validation
    are refused: ``--device cpu``, ``--check``, ``--model-preset``, and a number of segments
    that Megatron's own flag does not have.

    Returns:
        A stack that removes the patches when it closes, at the latest when the process ends.

    Raises:
        SystemExit: the flags cannot work; the exit code is 2.
    """
    with refusing() as patched:
        _check_parsed_elsewhere(args)
        patched.enter_context(fold3d_patches.install_platform(args.device))
        launch.install(args, patched)
    return patched


@contextmanager
def refusing() -> Iterator[ExitStack]:
    """Give a stack for patches, which closes when the process ends; a mistake ends the script."""
    with ExitStack() as failing:
        patched = failing.enter_context(ExitStack())
        with refused():
            yield patched
        failing.pop_all()
    atexit.register(patched.close)
    leaving.tell_failures(patched)


@contextmanager
def refused() -> Iterator[None]:
    """End the script, with one message, at a mistake of the user's."""
    try:
        yield
    except ArgumentError as error:
        sys.exit(refuse(ValueError(f"{error}; rename the script's own flag")))
    except MISTAKES as error:
        sys.exit(refuse(error))


def _check_parsed_elsewhere(args: Namespace) -> None:
    """Refuse flags that have to be known before Megatron validates its flags.

    Raises:
        ValueError: one message in the form found, rule, fix.
    """
    if not hasattr(args, "schedule"):
        raise ValueError(
            "found no --schedule: the flags of fold3d are missing; parse with "
            "extra_args_provider=fold3d.add_arguments"
        )
    if not hasattr(args, "virtual_pipeline_model_parallel_size"):
        raise ValueError(
            "found flags that are not validated: fold3d.install reads what Megatron derives; "
            "call it after parse_and_validate_args"
        )
    number = "N" if args.segments == AUTO else args.segments
    segments = typed(flag_of("segments"), args.segments)
    is_late = {
        "--device cpu: it patches Megatron before its flags are validated; drop it": (
            args.device == "cpu"
        ),
        "--check: it stands for GPUs and ranks before Megatron validates its flags; drop it": (
            args.check is not None
        ),
        f"--model-preset {args.model_preset}: it stands for flags that are parsed already; give "
        "those flags": args.model_preset is not None,
        f"{segments}: Megatron has derived its virtual stages already; give "
        f"--num-virtual-stages-per-pipeline-rank {number}": (
            args.segments not in (None, num_segments(args))
        ),
    }
    if late := [problem for problem, there in is_late.items() if there]:
        raise ValueError(f"{late[0]}, or parse with fold3d.parse_args")
