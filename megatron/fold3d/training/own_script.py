"""What a Megatron script of the user's calls, by the names in `megatron.fold3d`.

Keeps one invariant: nothing is patched until one of these is called, and then until the process
ends, or until the stack that it returned is closed. A mistake of the user's ends as in our own
scripts: one message, exit code 2.
"""

import atexit
import sys
from argparse import ArgumentError, Namespace
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import fold3d_patches
from megatron.fold3d.config.all_flags import add_arguments
from megatron.fold3d.config.segment_flags import AUTO, num_segments
from megatron.fold3d.training import launch, leaving

__all__ = ["add_arguments", "install", "parse_args"]


def parse_args(
    extra_args_provider: launch.AddArguments | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    *,
    ignore_unknown_args: bool = False,
) -> Namespace:
    """Parse ``sys.argv`` as Megatron's ``parse_and_validate_args``, and patch Megatron.

    Call it once, where the script called ``parse_and_validate_args``. The patches are those that
    the flags ask for; without ``--schedule`` Megatron trains as ever. They stay until the process
    ends. A mistake in the flags is printed in one message. Of a failure later, the rank that
    failed first is named last.

    Args:
        extra_args_provider: adds the script's own flags to the parser and returns it.
        args_defaults: values of flags that are not given, by their attributes' names.
        ignore_unknown_args: leave flags that nobody has added to the script.

    Returns:
        Megatron's namespace, validated and set as its global arguments, with the flags of
        `add_arguments` in it.

    Raises:
        SystemExit: the flags cannot work; the exit code is 2.
    """
    with ExitStack() as patched:
        try:
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
        except ArgumentError as error:
            sys.exit(launch.refuse(ValueError(f"{error}; rename the script's own flag")))
        except launch.MISTAKES as error:
            sys.exit(launch.refuse(error))
        stack = patched.pop_all()
    atexit.register(stack.close)
    leaving.tell_failures(stack)
    return args


def install(args: Namespace) -> ExitStack:
    """Patch Megatron as flags say that Megatron has parsed with `add_arguments` and validated.

    For scripts that cannot leave parsing to `parse_args`. What has to be known before validation
    is refused: ``--device cpu``, ``--check``, ``--model-preset``, and ``--segments`` unless
    Megatron's own flag says the same.

    Returns:
        A stack that takes the patches off when it closes, at the latest when the process ends.

    Raises:
        SystemExit: the flags cannot work; the exit code is 2.
    """
    with ExitStack() as patched:
        try:
            _check_parsed_elsewhere(args)
            patched.enter_context(fold3d_patches.install_platform(args.device))
            launch.install(args, patched)
        except launch.MISTAKES as error:
            sys.exit(launch.refuse(error))
        stack = patched.pop_all()
    atexit.register(stack.close)
    leaving.tell_failures(stack)
    return stack


def _check_parsed_elsewhere(args: Namespace) -> None:
    """Refuse what has to be known before Megatron validates its flags.

    Raises:
        ValueError: what was found, why it comes too late, and what to do.
    """
    fix = "or parse with fold3d.parse_args"
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
    if args.device == "cpu":
        raise ValueError(
            f"--device cpu: it patches Megatron before its flags are validated; drop it, {fix}"
        )
    if args.check is not None:
        raise ValueError(
            "--check: it stands for GPUs and ranks before Megatron validates its flags; "
            f"drop it, {fix}"
        )
    if args.model_preset:
        raise ValueError(
            f"--model-preset {args.model_preset}: it stands for flags that are parsed already; "
            f"give those flags, {fix}"
        )
    if args.segments is not None and args.segments != num_segments(args):
        number = "N" if args.segments == AUTO else args.segments
        raise ValueError(
            f"--segments {args.segments}: Megatron has derived its virtual stages already; give "
            f"--num-virtual-stages-per-pipeline-rank {number}, {fix}"
        )
