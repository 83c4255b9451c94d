"""``--schedule``: the word that names the order of computation and further choices.

`plan.schedule_word` has the grammar. The namespace keeps the word as text, so that Megatron's
checkpoints, which hold the namespace, load without this package.
"""

from argparse import ArgumentTypeError, Namespace, _ActionsContainer
from collections.abc import Iterator
from functools import cache

from megatron.fold3d.config.spelling import named
from megatron.fold3d.plan.choice import file_of
from megatron.fold3d.plan.ir import Op, PlanError
from megatron.fold3d.plan.ops import WEIGHT_OPS
from megatron.fold3d.plan.schedule_word import STOCK, VALUES, Part, Word
from megatron.fold3d.plan.schedules import check_forwards_ahead

_SMALLEST_SLICE = 4096  # bytes; a smaller message costs more than its content


def add_schedule_word(group: _ActionsContainer, text: str) -> None:
    """Add ``--schedule`` to a parser; ``text`` is the help."""
    group.add_argument("--schedule", type=_checked, default=STOCK, metavar="WORD", help=text)


def _checked(text: str) -> str:
    try:
        return str(Word.parse(text))
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def word_of(args: Namespace) -> Word:
    """Return the word of ``--schedule``, parsed."""
    return _word(args.schedule)


_word = cache(Word.parse)


def parts_of(args: Namespace, key: str, value: str = "") -> tuple[Part, ...]:
    """Return the parts of the word that have a key, including the parts that `with_plan` adds.

    Args:
        value: the value to look for; if empty, any value but the default.
    """
    return tuple(
        part
        for part in (*word_of(args).parts, *getattr(args, "parts_of_plan", ()))
        if part.key == key and (part.value == value if value else part.value != VALUES[key][0])
    )


def spelled_parts(args: Namespace, key: str, value: str = "") -> str:
    """Return the parts of `parts_of` as text for a message; empty if there are none."""
    return ":".join(map(str, parts_of(args, key, value)))


def with_plan(args: Namespace) -> Namespace:
    """Return a namespace with the parts that follow from the actions of a user's plan file.

    These are separate weight gradients, early recomputation and slices of DP.sync.
    """
    if (file := file_of(word_of(args).order)) is None:
        return args
    from megatron.fold3d.plan.files import read_plan
    from megatron.fold3d.plan.passes.sliced_grad_sync import has_slices

    try:
        plan = read_plan(file)
    except (OSError, ValueError):
        return args  # an unreadable file is refused where its sizes are compared

    def parts() -> Iterator[Part]:
        for key, value, ops in (
            ("wgrad", "last", WEIGHT_OPS),
            ("recompute", "early", {Op.RECOMPUTE}),
        ):
            stages = {stage for program in plan.programs for stage, op, _ in program if op in ops}
            if stages:
                segments = {stage // plan.num_ranks for stage in stages}
                yield Part(key, value, tuple(sorted(segments)))
        if any(map(has_slices, plan.programs)):
            yield Part("slices", "on")

    return Namespace(**vars(args) | {"parts_of_plan": (*parts(),)})


def group_of(args: Namespace) -> int | None:
    """Return the number of micro-batches in a group, from the word or from Megatron's flag."""
    group: int | None = word_of(args).number("group") or args.microbatch_group_size_per_vp_stage
    return group


def measures_shares(args: Namespace) -> bool:
    """Tell whether shares of deferred DP.sync follow from measured times.

    With the distributed optimizer the share is 1 and nothing is measured: all-gathers already fill
    the next forward, and deferred reduce-scatters would prolong it. Shares are measured only if
    weight gradients are delayed, since their reduce-scatters then end after the first segment's.
    """
    is_sharded = args.use_distributed_optimizer and not parts_of(args, "wgrad")
    is_open = parts_of(args, "step") and word_of(args).value("share") is None
    return bool(is_open and not is_sharded)


def schedule_problems(args: Namespace) -> Iterator[str]:
    """Yield one message (found, rule, fix) for each problem with the order of computation."""
    word = word_of(args)
    schedule, file, ahead = word.order, file_of(word.order), word.value("ahead")
    if file and not file.is_file():
        yield f"--schedule plan={file}: no such file; write one with `fold3d plan`"
    of_megatron = args.microbatch_group_size_per_vp_stage
    if (group := word.number("group")) is not None:
        found = f"group={group}"
        if schedule != "interleaved":
            yield f"{found} with {named(schedule)}: only interleaved has groups; drop it"
        elif group < args.pipeline_model_parallel_size:
            yield (
                f"{found}: ranks wait for one another when a group is smaller than "
                f"--pipeline-model-parallel-size; give {args.pipeline_model_parallel_size} or more"
            )
        elif of_megatron not in (None, group):
            yield (
                f"{found} with --microbatch-group-size-per-virtual-pipeline-stage {of_megatron}: "
                "both are the micro-batches of a group; drop one of the two"
            )
    if (group := group_of(args)) is not None and word.value("pairs") == "on":
        fewest = 2 * args.pipeline_model_parallel_size
        if group % 2 or group < fewest:
            yield (
                f"pairs=on with groups of {group} micro-batches: a group is of whole pairs, at "
                f"least one for each rank; give an even number from {fewest} on"
            )
    if ahead is not None:
        try:
            check_forwards_ahead("auto" if ahead == "auto" else int(ahead), schedule)
        except PlanError as error:
            yield str(error)
    gaps = parts_of(args, "wgrad", "gaps")
    if (most := word.number("held")) is not None and (not gaps or most < 1):
        yield (
            f"held={most}: it limits what wgrad=gaps holds, and a rank holds at least one; give "
            "both, or drop it"
        )


def share_problems(args: Namespace) -> Iterator[str]:
    """Yield one message (found, rule, fix) per impossible share or size of slices."""
    word, defers = word_of(args), parts_of(args, "step")
    share, slice_bytes = word.number("share"), word.number("slice-bytes")
    if slice_bytes is not None and slice_bytes < _SMALLEST_SLICE:
        yield (
            f"slice-bytes={slice_bytes}: a slice this small costs more to send than it "
            f"carries; give at least {_SMALLEST_SLICE}"
        )
    if slice_bytes is not None and not defers and not args.preemptive_comm:
        yield (
            f"slice-bytes={slice_bytes} without step=next: DP.sync is Megatron's, in buckets; add "
            "step=next, or give --ddp-bucket-size"
        )
    if share is not None and defers and not 0 <= share <= 1:
        yield f"share={share}: it is a share of DP.sync; give a number from 0 to 1"
