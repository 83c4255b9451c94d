"""``wgrad=``: which weight gradients are apart from their backwards, and whose split that is.

Schedules such as zb-h1 split the backward without that key, and have the same limits.
"""

from argparse import Namespace
from importlib import metadata

from megatron.fold3d.plan.schedule_word import Part, parts_of
from megatron.fold3d.plan.schedules import SPLIT_SCHEDULES

_OLDEST_ENGINE = 2, 8  # as Megatron asks for with its own --delay-wgrad-compute


def split_segments(args: Namespace, schedule: str, num_segments: int) -> tuple[int, ...]:
    """Return the segments whose weight gradients may be apart from their backwards."""
    if schedule in SPLIT_SCHEDULES:
        return (0,)
    delayed: tuple[int, ...] | str = args.delay_weight_grads
    return tuple(range(num_segments)) if isinstance(delayed, str) else delayed


def weight_grad_part(args: Namespace) -> str:
    """Return ``wgrad=`` as the word has it."""
    delayed = args.delay_weight_grads
    if not isinstance(delayed, tuple):
        return str(Part("wgrad", "gaps"))
    behind = args.behind_backwards
    last = tuple(segment for segment in delayed if segment not in behind)
    return ":".join(map(str, parts_of("wgrad", (("behind", behind), ("last", last)))))


def old_engine(_: Namespace) -> str:
    """Return a Transformer Engine that is installed and too old; the first two numbers count.

    It is not imported.
    """
    try:
        text = metadata.version("transformer-engine")
    except metadata.PackageNotFoundError:
        return ""
    version = ".".join(text.split(".")[:2])
    is_old = tuple(map(int, version.split("."))) < _OLDEST_ENGINE
    return f"Transformer Engine {version}" if is_old else ""
