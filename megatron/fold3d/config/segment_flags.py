"""``--segments``: a number or auto, and what cannot be combined with auto."""

from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator

from megatron.fold3d.config.layer_split import fitting_segments, num_layers, uneven_ranks
from megatron.fold3d.config.refusals import named
from megatron.fold3d.plan.schedules import ONE_SEGMENT_SCHEDULES

AUTO = "auto"


def segments_or_auto(text: str) -> int | str:
    """Read the value of ``--segments``."""
    try:
        return text if text == AUTO else int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is neither a number nor {AUTO}") from None


def auto_problems(args: Namespace, schedule: str, virtual_stages: str | None) -> Iterator[str]:
    """Yield found, rule and fix of all that is in the way of ``--segments auto``.

    Args:
        args: Megatron's namespace, as parsed.
        schedule: that will run.
        virtual_stages: the flag of Megatron's that gives them, if one does.
    """
    if schedule in ("stock", "plan-file", *ONE_SEGMENT_SCHEDULES):
        yield (
            f"--segments auto with {named(schedule)}: it is chosen for schedules of several "
            "segments; give --segments N, or --schedule aiao"
        )
    if virtual_stages is not None:
        yield f"--segments auto with {virtual_stages}: that is a number; drop one of the two"
    elif not num_layers(args):
        yield (
            "--segments auto without --num-layers: the checkpoint would tell too late; "
            "give --num-layers"
        )
    elif not fitting_segments(args):
        yield uneven_ranks(args)
