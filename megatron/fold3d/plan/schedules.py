"""Schedules: the order in which each rank computes, one generator per schedule.

A generator yields the forwards and backwards of one rank and nothing else; transfers, gradient
sync and offload are added by `passes`. Every schedule runs micro-batches first in, first out in
forward and in backward, so gradients are summed in the same order whichever schedule runs.

    p = num_ranks, v = num_segments, m = num_microbatches; rank 0 of p=2, v=2, m=3:

    afab           0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2
    aiao           0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2
    breadth_first  the same as aiao: Megatron's interleaved schedule with a group of m
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import Literal

from megatron.fold3d.plan.ir import Action, Op, Plan, PlanError, gc_paused

LastSegment = Literal["1f1b", "afab"]
_MOST_FORWARDS = 10_000_000  # about 10 GB of actions, with their backwards and transfers


def afab(rank: int, num_ranks: int, num_segments: int, num_microbatches: int) -> Iterator[Action]:
    """Yield all forwards, then all backwards, one segment after the other.

    With one segment this is GPipe; with more it is the looped breadth-first order of
    Lamy-Poirier (2023), torch's ``ScheduleLoopedBFS`` with first-in first-out backwards.
    """
    stages = _stages(rank, num_ranks, num_segments)
    yield from _forwards(stages, num_microbatches)
    yield from _backwards(stages, num_microbatches)


def one_f_one_b(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
    """Yield 1F1B on one segment: rank r runs ``p - 1 - r`` forwards ahead (Megatron Sec. 2.2)."""
    yield from _one_f_one_b([rank], num_microbatches, num_ranks - 1 - rank)


def shifted_critical_path(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
    """Yield 1F1B with one forward more ahead on the last rank but one (Merak Sec. 5.1).

    The extra forward fills that rank's first bubble, so the last rank, which skips recomputation
    and holds the head, is off the critical path. Merak's recomputation ahead of a backward's
    gradient is not part of the order: Megatron recomputes inside the backward.
    """
    ahead = num_ranks - 1 - rank
    yield from _one_f_one_b([rank], num_microbatches, 2 if ahead == 1 else ahead)


def interleaved(
    rank: int, num_ranks: int, num_segments: int, num_microbatches: int, group_size: int
) -> Iterator[Action]:
    """Yield Megatron's interleaved 1F1B (Megatron Sec. 2.2.2).

    Groups of ``group_size`` micro-batches (Megatron's
    ``--microbatch-group-size-per-virtual-pipeline-stage``) pass through all segments before the
    next group starts: p is Megatron's default, m is breadth-first. With one segment it is 1F1B
    with twice the forwards ahead, which stock Megatron has no name for. Any number of
    micro-batches runs, also where Megatron refuses one: see `_groups`.
    """
    stages = _stages(rank, num_ranks, num_segments)
    groups = _groups(num_microbatches, group_size, num_ranks)
    forwards = [Action(s, Op.FORWARD, m) for group in groups for s in stages for m in group]
    backwards = [Action(s, Op.BACKWARD, m) for group in groups for s in stages[::-1] for m in group]
    ahead = 2 * (num_ranks - 1 - rank) + (num_segments - 1) * max(map(len, groups))
    yield from _alternate(forwards, backwards, ahead)


def breadth_first(
    rank: int, num_ranks: int, num_segments: int, num_microbatches: int
) -> Iterator[Action]:
    """Yield Megatron's interleaved 1F1B with one group of all micro-batches."""
    yield from interleaved(rank, num_ranks, num_segments, num_microbatches, num_microbatches)


def aiao(
    rank: int,
    num_ranks: int,
    num_segments: int,
    num_microbatches: int,
    last_segment: LastSegment = "1f1b",
) -> Iterator[Action]:
    """Yield all-in-all-out: all micro-batches pass one segment before the next (Sec. III-B).

    ``last_segment="afab"`` is Algorithm 1 as printed. ``"1f1b"`` runs each micro-batch's backward
    of the last segment as soon as it can: the same time, with at most ``2 (p - 1 - r) + 1`` of
    the last segment's activations (and of its logits, on the last rank one) instead of m.
    """
    *stages, last = _stages(rank, num_ranks, num_segments)
    ahead = num_microbatches if last_segment == "afab" else 2 * (num_ranks - 1 - rank)
    yield from _forwards(stages, num_microbatches)
    yield from _one_f_one_b([last], num_microbatches, ahead)
    yield from _backwards(stages, num_microbatches)


SCHEDULES = ("aiao", "afab", "1f1b", "interleaved", "breadth-first", "shifted-critical-path")
ONE_SEGMENT_SCHEDULES = frozenset({"1f1b", "shifted-critical-path"})


@gc_paused()
def build(
    schedule: str,
    *,
    num_ranks: int,
    num_segments: int,
    num_microbatches: int,
    last_segment: LastSegment = "1f1b",
    group_size: int | None = None,
) -> Plan:
    """Return the compute plan of a schedule by its name on the command line.

    Args:
        schedule: one of `SCHEDULES`.
        last_segment: how ``aiao`` runs its last segment.
        group_size: micro-batches per group of ``interleaved``; the number of ranks if None.

    Raises:
        PlanError: the name is unknown, a size is below one, a group is smaller than the number of
            ranks, or the schedule has one segment only.
    """
    sizes = {"ranks": num_ranks, "segments": num_segments, "micro-batches": num_microbatches}
    for name, size in sizes.items():
        if size < 1:
            raise PlanError(f"found {size} {name}; a plan needs at least one")
    if (forwards := num_ranks * num_segments * num_microbatches) > _MOST_FORWARDS:
        found = ", ".join(f"{size} {name}" for name, size in sizes.items())
        raise PlanError(
            f"found {found}: {forwards} forwards; no memory holds a plan of over {_MOST_FORWARDS}"
        )
    if group_size is None:
        group_size = num_ranks
    elif group_size < num_ranks:
        raise PlanError(
            f"groups of {group_size} micro-batches on {num_ranks} ranks; a smaller group leaves "
            f"ranks waiting for one another, so give at least {num_ranks}"
        )
    if schedule in ONE_SEGMENT_SCHEDULES and num_segments != 1:
        raise PlanError(
            f"{schedule} runs one segment per rank, found {num_segments}; "
            "try --segments 1, or --schedule aiao or interleaved"
        )
    looped = (num_ranks, num_segments, num_microbatches)
    generators: dict[str, Callable[[int], Iterable[Action]]] = {
        "aiao": lambda rank: aiao(rank, *looped, last_segment),
        "afab": lambda rank: afab(rank, *looped),
        "1f1b": lambda rank: one_f_one_b(rank, num_ranks, num_microbatches),
        "interleaved": lambda rank: interleaved(rank, *looped, group_size),
        "breadth-first": lambda rank: breadth_first(rank, *looped),
        "shifted-critical-path": lambda rank: shifted_critical_path(
            rank, num_ranks, num_microbatches
        ),
    }
    if schedule not in generators:
        raise PlanError(f"unknown schedule {schedule!r}; choose from {', '.join(generators)}")
    return Plan.generate(generators[schedule], num_ranks)


def _stages(rank: int, num_ranks: int, num_segments: int) -> range:
    return range(rank, num_ranks * num_segments, num_ranks)


def _groups(num_microbatches: int, group_size: int, num_ranks: int) -> list[range]:
    """Cut the micro-batches into groups of ``group_size``; what is left over is a smaller group.

    Unless fewer than p are left over: a micro-batch enters a rank's next segment when it has passed
    all ranks, and in so small a group ranks would wait for one another, some of them for ever. All
    groups then share what is left over.
    """
    num_groups, rest = divmod(num_microbatches, group_size)
    if rest >= num_ranks:
        bounds = [*range(0, num_microbatches, group_size), num_microbatches]
    else:
        num_groups = max(num_groups, 1)
        bounds = [num_microbatches * i // num_groups for i in range(num_groups + 1)]
    return [range(first, end) for first, end in pairwise(bounds)]


def _forwards(stages: Iterable[int], num_microbatches: int) -> Iterator[Action]:
    return (Action(s, Op.FORWARD, m) for s in stages for m in range(num_microbatches))


def _backwards(stages: Sequence[int], num_microbatches: int) -> Iterator[Action]:
    return (Action(s, Op.BACKWARD, m) for s in reversed(stages) for m in range(num_microbatches))


def _one_f_one_b(stages: Sequence[int], num_microbatches: int, ahead: int) -> Iterator[Action]:
    forwards = list(_forwards(stages, num_microbatches))
    return _alternate(forwards, list(_backwards(stages, num_microbatches)), ahead)


def _alternate(
    forwards: Sequence[Action], backwards: Sequence[Action], ahead: int
) -> Iterator[Action]:
    """Yield ``ahead`` forwards, then one forward and one backward in turn, then what is left."""
    ahead = min(ahead, len(forwards))
    steady = zip(forwards[ahead:], backwards, strict=False)
    return chain(forwards[:ahead], chain.from_iterable(steady), backwards[len(forwards) - ahead :])
