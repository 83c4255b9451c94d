"""``--segments``: its value, Megatron's flags for virtual stages, and the split of layers."""

from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator

from megatron.fold3d.config.job_sizes import (
    fitting_segments,
    given_ends,
    layers_per_rank,
    may_be_uneven,
    num_layers,
    uneven_ranks,
    written_out,
)
from megatron.fold3d.config.schedule_flags import word_of
from megatron.fold3d.config.spelling import flag_of, named, typed
from megatron.fold3d.plan.choice import file_of
from megatron.fold3d.plan.schedule_word import AUTO, STOCK
from megatron.fold3d.plan.schedules import ONE_SEGMENT_SCHEDULES

# Megatron derives virtual stages from one of these flags, and accepts only one at a time.
_VIRTUAL_STAGES = (
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
    "pipeline_model_parallel_layout",
)


MEASURES = "it measures the hardware that trains; give --segments N, `fold3d search` tells which"
"""Why nothing but a training takes ``--segments auto``."""


def segments_or_auto(text: str) -> int | str:
    """Read the value of ``--segments``."""
    try:
        return text if text == AUTO else int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is neither a number nor {AUTO}") from None


def _auto_problems(args: Namespace) -> Iterator[str]:
    """Yield one message (found, rule, fix) per setting that excludes ``--segments auto``."""
    schedule = word_of(args).order
    if file_of(schedule) or schedule in (STOCK, *ONE_SEGMENT_SCHEDULES):
        yield (
            f"--segments auto with {named(schedule)}: it is chosen for schedules of several "
            "segments; give --segments N, or --schedule aiao"
        )
    if (virtual_stages := virtual_stage_flag(args)) is not None:
        yield f"--segments auto with {virtual_stages}: that is a number; drop one of the two"
    elif args.check is not None:
        yield f"--segments auto with --check: {MEASURES}"
    elif not num_layers(args):
        yield (
            "--segments auto without --num-layers: the checkpoint would tell too late; "
            "give --num-layers"
        )
    elif not fitting_segments(args):
        has_layer_for_each_rank = num_layers(args) >= args.pipeline_model_parallel_size
        if not (may_be_uneven(args) and has_layer_for_each_rank):
            yield uneven_ranks(args)


def virtual_stage_flag(args: Namespace) -> str | None:
    """Return Megatron's flag that sets virtual stages, with its value; None if there is none."""
    for name in _VIRTUAL_STAGES:
        if (value := getattr(args, name)) is not None:
            return typed(flag_of(name), value)
    return None


def num_segments(args: Namespace) -> int:
    """Return the model chunks per rank, as Megatron's validation derives them.

    The number is 0 while only a checkpoint, which validation reads, knows the number of layers.
    """
    if hasattr(args, "virtual_pipeline_model_parallel_size"):
        return int(args.virtual_pipeline_model_parallel_size or 1)
    by_layers = args.num_layers_per_virtual_pipeline_stage is not None and not num_layers(args)
    if args.use_checkpoint_args and (args.use_mp_args_from_checkpoint_args or by_layers):
        return 0
    num_ranks: int = args.pipeline_model_parallel_size
    if args.pipeline_model_parallel_layout is not None:
        return (written_out(args.pipeline_model_parallel_layout).count("|") + 1) // num_ranks
    if args.num_layers_per_virtual_pipeline_stage is not None:
        return num_layers(args) // num_ranks // int(args.num_layers_per_virtual_pipeline_stage)
    chosen = 1 if args.segments == AUTO else args.segments
    return int(args.num_virtual_stages_per_pipeline_rank or chosen or 1)


def segment_problems(args: Namespace, num_segments: int) -> Iterator[str]:
    """Yield one message (found, rule, fix) per reason why the number of segments cannot run."""
    schedule = word_of(args).order
    if args.segments is None and schedule == "stock":
        return
    if args.segments == AUTO:
        yield from _auto_problems(args)
        return
    num_ranks = args.pipeline_model_parallel_size
    if args.segments is not None and args.segments < 1:
        yield f"--segments {args.segments}: a rank holds at least one segment; try --segments 1"
        return
    if not num_segments and args.use_checkpoint_args:
        return
    if args.segments not in (None, num_segments):
        yield (
            f"--segments {args.segments} with {virtual_stage_flag(args)}: Megatron makes "
            f"{num_segments} of the latter; drop one of the two"
        )
    if num_segments > 1 and num_ranks == 1 and num_layers(args):
        yield (
            f"{num_segments} segments with --pipeline-model-parallel-size 1: without a pipeline "
            "Megatron builds one model chunk; use --segments 1 or more ranks"
        )
    if num_segments > 1 and schedule in ONE_SEGMENT_SCHEDULES:
        yield (
            f"{num_segments} segments with {named(schedule)}: it runs one segment per rank; "
            "use --segments 1, or --schedule aiao or interleaved"
        )
    if args.pipeline_model_parallel_layout is not None:
        return
    if num_layers(args):
        yield from _split(args, num_segments)
    elif args.num_layers_per_virtual_pipeline_stage is not None:
        yield (
            f"{virtual_stage_flag(args)} without --num-layers: how many segments that makes is "
            "not known; use --segments"
        )


def _split(args: Namespace, num_segments: int) -> Iterator[str]:
    """Yield one message if the layers cannot be split evenly over ranks and segments."""
    ends = given_ends(args)
    if len(ends) == args.pipeline_model_parallel_size == 2 and num_segments > 1:
        found = " with ".join(f"{flag} {layers}" for flag, layers in ends.items())
        yield (
            f"{found}: with several segments Megatron "
            "divides by the number of ranks between the two, and there is none; drop one of the two"
        )
    fitting = fitting_segments(args)
    per_stage = args.num_layers_per_virtual_pipeline_stage
    if not fitting:
        yield uneven_ranks(args)
    elif per_stage is not None and num_layers(args) % (
        args.pipeline_model_parallel_size * per_stage
    ):
        yield (
            f"{virtual_stage_flag(args)} with --num-layers {num_layers(args)}: they divide the "
            f"layers of each of {args.pipeline_model_parallel_size} ranks; use --segments "
            f"{', '.join(map(str, fitting))}"
        )
    elif num_segments not in fitting:
        per_rank = " and ".join(map(str, layers_per_rank(args)))
        yield (
            f"{num_segments} segments with {per_rank} layers per rank: "
            "every segment of a rank holds as many layers; try --segments "
            f"{', '.join(map(str, fitting))}, or --pipeline-model-parallel-layout"
        )
