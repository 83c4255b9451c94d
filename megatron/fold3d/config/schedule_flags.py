"""``--schedule``: the word that names the order of computation and what goes with it.

`plan.schedule_word` has the grammar. The parser sets one attribute for each key, so that rules
read a number or segments, not a word.
"""

from argparse import Action, ArgumentError, ArgumentParser, Namespace
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.fold3d.config.argument_group import ArgumentGroup
from megatron.fold3d.config.spelling import named
from megatron.fold3d.plan.files import read_plan
from megatron.fold3d.plan.ir import Op, PlanError
from megatron.fold3d.plan.ops import WEIGHT_OPS
from megatron.fold3d.plan.passes.sliced_grad_sync import has_slices
from megatron.fold3d.plan.schedule_word import AUTO, PLAN, Part, Word
from megatron.fold3d.plan.schedules import check_forwards_ahead

ALL = "all"  # of the segments, as long as their number is not known

# What a namespace has without a word: the attributes that a word sets.
WORD_DEFAULTS: dict[str, Any] = {
    "schedule": None,
    "plan_file": None,
    "schedule_keys": (),
    "replicate_optimizer": (),
    "backward_share": None,
    "delay_weight_grads": (),
    "behind_backwards": (),
    "recompute_early": (),
    "forwards_ahead": None,
    "most_activations": None,
    "schedule_group": None,
    "dp_slices": AUTO,
    "dp_slice_bytes": None,
    "overlap_tensor_parallel": False,
}


class _ReadWord(Action):
    """Sets the attributes of `WORD_DEFAULTS` from a word."""

    def __call__(
        self,
        parser: ArgumentParser,
        namespace: Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Read the word; the last of several counts."""
        try:
            word = Word.parse(str(values))
        except ValueError as error:
            raise ArgumentError(self, str(error)) from None
        for name, value in (WORD_DEFAULTS | attributes_of(word)).items():
            setattr(namespace, name, value)


def add_schedule_word(group: ArgumentGroup | ArgumentParser, text: str, **options: Any) -> None:
    """Add ``--schedule`` to a parser, with this help."""
    group.set_defaults(**WORD_DEFAULTS)
    group.add_argument("--schedule", action=_ReadWord, metavar="WORD", help=text, **options)


def attributes_of(word: Word) -> dict[str, Any]:
    """Return the attributes that a word sets, beside their defaults."""
    kind, _, file = word.order.partition("=")
    found: dict[str, Any] = {"schedule_keys": tuple(part.key for part in word.parts)}
    found |= {"plan_file": Path(file)} if kind == PLAN else {"schedule": word.order}
    for part in word.parts:
        for name, value in _READERS[part.key](part).items():
            found[name] = _joined(found.get(name, ()), value)
    share = word.value("share")
    if share is not None and found.get("backward_share") == AUTO:
        found["backward_share"] = float(share)
    return found


def _joined(before: Any, value: Any) -> Any:
    """Return the segments of two parts of one key; of other values there is one."""
    both = isinstance(before, tuple) and isinstance(value, tuple)
    return tuple(sorted(before + value)) if both else value


def _segments(part: Part) -> Any:
    return ALL if part.segments is None else part.segments


def _optimizer(part: Part) -> dict[str, Any]:
    values = {"sharded": (), "replicated": _segments(part), AUTO: AUTO}
    return {"replicate_optimizer": values[part.value]}


def _wgrad(part: Part) -> dict[str, Any]:
    if part.value in ("backward", "gaps"):
        return {"delay_weight_grads": AUTO if part.value == "gaps" else ()}
    delayed = {"delay_weight_grads": _segments(part)}
    return delayed | ({"behind_backwards": _segments(part)} if part.value == "behind" else {})


def _number(part: Part) -> int | str:
    return AUTO if part.value == AUTO else int(part.value)


_READERS: dict[str, Callable[[Part], dict[str, Any]]] = {
    "optimizer": _optimizer,
    "step": lambda part: {"backward_share": AUTO if part.value == "next" else None},
    "wgrad": _wgrad,
    "recompute": lambda part: {"recompute_early": _segments(part) if part.value == "early" else ()},
    "ahead": lambda part: {"forwards_ahead": _number(part)},
    "held": lambda part: {"most_activations": int(part.value)},
    "group": lambda part: {"schedule_group": int(part.value)},
    "share": lambda _: {},
    "slices": lambda part: {"dp_slices": part.value},
    "slice-bytes": lambda part: {"dp_slice_bytes": int(part.value)},
    "pairs": lambda part: {"overlap_tensor_parallel": part.value == "on"},
}


def written_out(args: Namespace, num_segments: int) -> Namespace:
    """Return a namespace that has the numbers of segments where a word has none."""
    every, found = tuple(range(max(1, num_segments))), vars(args)
    return Namespace(**found | {name: every for name in WORD_DEFAULTS if found[name] == ALL})


def with_plan(args: Namespace) -> Namespace:
    """Return a namespace with what the plan of its file needs, if it has a file with a plan.

    Weight gradients apart, early recomputation and slices of DP.sync follow from the actions.
    """
    try:
        plan = read_plan(args.plan_file)
    except (OSError, ValueError):
        return args  # it is refused where its sizes are compared

    def segments(ops: Collection[Op]) -> tuple[int, ...]:
        stages = {stage for program in plan.programs for stage, op, _ in program if op in ops}
        return tuple(sorted({stage // plan.num_ranks for stage in stages}))

    needed: dict[str, Any] = {
        "delay_weight_grads": segments(WEIGHT_OPS),
        "recompute_early": segments({Op.RECOMPUTE}),
        "dp_slices": "on" if any(map(has_slices, plan.programs)) else args.dp_slices,
    }
    return Namespace(**vars(args) | needed)


def schedule_of(args: Namespace) -> str:
    """Return a name of `plan.schedules.SCHEDULES`, ``auto``, ``stock`` or ``plan-file``."""
    return "plan-file" if args.plan_file else args.schedule or "stock"


def group_of(args: Namespace) -> int | None:
    """Return the micro-batches of a group, from the word or from Megatron's flag."""
    group: int | None = args.schedule_group or args.microbatch_group_size_per_vp_stage
    return group


def part_of(key: str, value: str, segments: tuple[int, ...] | str = ()) -> str:
    """Return a part of the word, as a message names it."""
    return str(Part(key, value, segments if isinstance(segments, tuple) and segments else None))


def schedule_problems(args: Namespace, schedule: str) -> Iterator[str]:
    """Yield one message (found, rule, fix) for each problem with the order of computation."""
    if args.plan_file and not args.plan_file.is_file():
        yield f"--schedule plan={args.plan_file}: no such file; write one with `fold3d plan`"
    of_megatron = args.microbatch_group_size_per_vp_stage
    if args.schedule_group is not None:
        found = f"group={args.schedule_group}"
        if schedule != "interleaved":
            yield f"{found} with {named(schedule)}: only interleaved has groups; drop it"
        elif args.schedule_group < args.pipeline_model_parallel_size:
            yield (
                f"{found}: ranks wait for one another when a group is smaller than "
                f"--pipeline-model-parallel-size; give {args.pipeline_model_parallel_size} or more"
            )
        elif of_megatron not in (None, args.schedule_group):
            yield (
                f"{found} with --microbatch-group-size-per-virtual-pipeline-stage {of_megatron}: "
                "both are the micro-batches of a group; drop one of the two"
            )
    if args.forwards_ahead is not None:
        try:
            check_forwards_ahead(args.forwards_ahead, schedule)
        except PlanError as error:
            yield str(error)
    if (most := args.most_activations) is not None and (
        args.delay_weight_grads != AUTO or most < 1
    ):
        yield (
            f"held={most}: it limits what wgrad=gaps holds, and a rank holds at least one; give "
            "both, or drop it"
        )
