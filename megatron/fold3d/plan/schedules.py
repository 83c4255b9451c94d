"""Schedules: the order in which each rank computes, one generator per schedule.

A generator yields only the computations of one rank; `passes` add transfers, gradient sync and
offload. Every schedule runs forwards, backwards and weight gradients in the order of micro-batches,
so all schedules sum gradients in the same order. Zero Bubble's schedules (Qi et al., ICLR 2024)
place weight gradients as if all computations took equally long; `place_weight_grads` uses given
times.

    p = num_ranks, v = num_segments, m = num_microbatches; rank 0 of p=2, v=2, m=3:

    afab           0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2
    aiao           0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2
    breadth_first  the same as aiao: Megatron's interleaved schedule with a group of m
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Literal

from megatron.fold3d.plan.ir import Action, Op, Plan, PlanError, gc_paused

_MOST_FORWARDS = 10_000_000  # about 10 GB of actions, with their backwards and transfers


def looped(
    rank: int,
    num_ranks: int,
    num_segments: int,
    num_microbatches: int,
    *,
    group_size: int,
    forwards_ahead: int = 2,
) -> Iterator[Action]:
    """Yield the order of most schedules: micro-batches pass through a rank's segments in groups.

    Groups of ``group_size`` micro-batches pass through all segments before the next group starts.
    In the last segment, rank r of p runs ``forwards_ahead (p - 1 - r)`` forwards ahead. From there
    on forwards and backwards alternate, so each backward runs as soon as possible.

    - A group of p with 2 forwards ahead is Megatron's interleaved 1F1B (Megatron Sec. 2.2.2);
      Megatron's ``--microbatch-group-size-per-virtual-pipeline-stage`` gives other groups. Any
      number of micro-batches runs, also one that Megatron refuses: see `groups_of`. With several
      groups, a rank runs at most two groups ahead, since the last rank sends inputs for a third
      group too late.
    - One group of all is AIAO (Sec. III-B), with 2 forwards ahead also Megatron's breadth-first. A
      rank holds at most ``2 (p - 1 - r) + 1`` of the last segment's activations, and the last rank
      only one micro-batch's logits. Algorithm 1 as printed runs m forwards ahead. That is `afab`,
      which takes the same time and holds all activations.
    - One segment and 1 forward ahead is 1F1B (Megatron Sec. 2.2), which exposes every transfer.
      More forwards ahead can hide transfers, in every schedule: see `policy.forwards_ahead`.
    """
    stages = range(rank, num_ranks * num_segments, num_ranks)
    groups = groups_of(num_microbatches, group_size, num_ranks)
    forwards = [Action(s, Op.FORWARD, m) for group in groups for s in stages for m in group]
    backwards = [Action(s, Op.BACKWARD, m) for group in groups for s in stages[::-1] for m in group]
    ahead = forwards_ahead * (num_ranks - 1 - rank)
    yield from alternate(forwards, backwards, forwards_first(groups, num_segments, ahead))


def forwards_first(groups: Sequence[Sequence[int]], num_segments: int, ahead: int) -> int:
    """Return how many forwards a rank of `looped` runs before forwards and backwards alternate.

    Args:
        groups: the micro-batches of each group.
        ahead: the number of forwards ahead in the last segment.
    """
    if num_segments > 1 and len(groups) > 1:
        ahead = min(ahead, 2 * min(map(len, groups)))
    return ahead + (num_segments - 1) * max(map(len, groups))


def one_f_one_b(
    rank: int, num_ranks: int, num_microbatches: int, forwards_ahead: int = 1
) -> Iterator[Action]:
    """Yield 1F1B: `looped` on one segment."""
    all_ = num_microbatches
    return looped(rank, num_ranks, 1, all_, group_size=all_, forwards_ahead=forwards_ahead)


def afab(rank: int, num_ranks: int, num_segments: int, num_microbatches: int) -> Iterator[Action]:
    """Yield all forwards, then all backwards, one segment after the other.

    With one segment this is GPipe; with more it is the looped breadth-first order of
    Lamy-Poirier (2023), torch's ``ScheduleLoopedBFS`` with first-in first-out backwards.
    """
    sizes = rank, num_ranks, num_segments, num_microbatches
    order = [*looped(*sizes, group_size=num_microbatches)]
    yield from (action for action in order if action.op is Op.FORWARD)
    yield from (action for action in order if action.op is Op.BACKWARD)


def shifted_critical_path(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
    """Yield 1F1B whose last rank but one runs its third forward first of all (Merak Sec. 5.1).

        1F1B  F0 F1 B0 F2 B1 F3 B2 F4 B3 ...
        here  F0 F1 F2 B0 B1 F3 B2 F4 B3 ...

    The third forward runs while this rank waits for its first gradient. From the second backward on
    the order is 1F1B's, so no micro-batch is delayed. All other ranks run 1F1B, and with fewer than
    three micro-batches this rank does too. The schedule is faster than 1F1B if the last rank does
    not recompute and the others recompute early, see `recompute_early`.
    """
    program = list(one_f_one_b(rank, num_ranks, num_microbatches))
    if rank == num_ranks - 2 and num_microbatches > 2:
        program[2:4] = reversed(program[2:4])
    yield from program


def zb_h1(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
    """Yield ZB-H1: 1F1B with weight gradients in the bubble (Sec. 2.1).

    Rank r runs 1F1B's ``p - 1 - r`` forwards ahead and delays the weight gradients of r
    micro-batches. Backwards come first, since another rank waits for them. Each rank holds at most
    p micro-batches, as many as the first rank of 1F1B. Rank 3 of p=4, m=5:

        F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 W2 W3 W4
    """
    order = one_f_one_b(rank, num_ranks, num_microbatches)
    yield from _split(order, rank, num_microbatches, delayed=rank)


def zb_h2(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
    """Yield ZB-H2: twice as many forwards ahead as ZB-H1, without a bubble (Sec. 2.2).

    Rank r runs ``2 (p - 1 - r)`` forwards ahead and delays the weight gradients of 2 r
    micro-batches: each rank holds up to ``2 p - 1``. If forwards, backwards and weight gradients
    are equally long, no rank waits between its first forward and its last weight gradient. Ranks
    begin and end one after the other. So the full gain needs a rank that begins an iteration before
    all other ranks have ended the previous one.
    """
    order = one_f_one_b(rank, num_ranks, num_microbatches, forwards_ahead=2)
    yield from _split(order, rank, num_microbatches, delayed=2 * rank)


SCHEDULES = (
    *("aiao", "afab", "1f1b", "interleaved", "breadth-first", "shifted-critical-path"),
    *("zb-h1", "zb-h2"),
)
SPLIT_SCHEDULES = frozenset({"zb-h1", "zb-h2"})
"""Schedules that split weight gradients from backwards."""
ONE_SEGMENT_SCHEDULES = frozenset({"1f1b", "shifted-critical-path"}) | SPLIT_SCHEDULES
FORWARDS_AHEAD: Mapping[str, int] = {"1f1b": 1, "aiao": 2, "interleaved": 2}
"""Default ``forwards_ahead``, by schedule; `build` refuses the option for other schedules."""


def check_sizes(num_ranks: int, num_segments: int, num_microbatches: int) -> None:
    """Raise `PlanError` if a plan of these sizes would be empty, or larger than any memory."""
    sizes = {"ranks": num_ranks, "segments": num_segments, "micro-batches": num_microbatches}
    for name, size in sizes.items():
        if size < 1:
            raise PlanError(f"found {size} {name}; a plan needs at least one")
    if (forwards := num_ranks * num_segments * num_microbatches) > _MOST_FORWARDS:
        found = ", ".join(f"{size} {name}" for name, size in sizes.items())
        raise PlanError(
            f"found {found}: {forwards} forwards; no memory holds a plan of over {_MOST_FORWARDS}"
        )


@gc_paused()
def build(
    schedule: str,
    *,
    num_ranks: int,
    num_segments: int,
    num_microbatches: int,
    group_size: int | None = None,
    forwards_ahead: int | None = None,
) -> Plan:
    """Return the compute plan of a schedule by its name on the command line.

    Args:
        group_size: micro-batches per group of ``interleaved``; the number of ranks if None.
        forwards_ahead: forwards that a rank runs for each later rank before forwards alternate with
            backwards, in ``1f1b``, ``interleaved`` and the last segment of ``aiao``; None is the
            default in `FORWARDS_AHEAD`.

    Raises:
        PlanError: the name is unknown, a size is below one, a group is smaller than the number of
            ranks, the schedule allows one segment only, or no forwards can run ahead.
    """
    check_sizes(num_ranks, num_segments, num_microbatches)
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
            "try one, or aiao or interleaved"
        )
    if forwards_ahead is not None:
        check_forwards_ahead(forwards_ahead, schedule)
    ahead = FORWARDS_AHEAD.get(schedule, 0) if forwards_ahead is None else forwards_ahead
    sizes, all_ = (num_ranks, num_segments, num_microbatches), num_microbatches
    one_segment = (num_ranks, num_microbatches)
    generators: dict[str, Callable[[int], Iterable[Action]]] = {
        "aiao": lambda rank: looped(rank, *sizes, group_size=all_, forwards_ahead=ahead),
        "afab": lambda rank: afab(rank, *sizes),
        "1f1b": lambda rank: one_f_one_b(rank, *one_segment, ahead),
        "interleaved": lambda rank: looped(
            rank, *sizes, group_size=group_size, forwards_ahead=ahead
        ),
        "breadth-first": lambda rank: looped(rank, *sizes, group_size=all_),
        "shifted-critical-path": lambda rank: shifted_critical_path(rank, *one_segment),
        "zb-h1": lambda rank: zb_h1(rank, *one_segment),
        "zb-h2": lambda rank: zb_h2(rank, *one_segment),
    }
    if schedule not in generators:
        raise PlanError(f"unknown schedule {schedule!r}; choose from {', '.join(SCHEDULES)}")
    return Plan(tuple(tuple(generators[schedule](rank)) for rank in range(num_ranks)))


def check_forwards_ahead(forwards_ahead: int | Literal["auto"], schedule: str) -> None:
    """Check that a schedule can run this number of forwards ahead.

    Raises:
        PlanError: the number is below one, or the schedule has no such option.
    """
    found = f"ahead={forwards_ahead}"
    if schedule not in FORWARDS_AHEAD:
        raise PlanError(
            f"{found} with --schedule {schedule}: only {', '.join(FORWARDS_AHEAD)} read it; "
            "drop it, or give one of these"
        )
    if forwards_ahead != "auto" and forwards_ahead < 1:
        raise PlanError(
            f"{found}: a rank runs at least one forward ahead for each rank behind it; the default "
            f"is {FORWARDS_AHEAD[schedule]}"
        )


def groups_of(num_microbatches: int, group_size: int, num_ranks: int) -> list[range]:
    """Cut the micro-batches into groups of ``group_size``; the remainder is a smaller group.

    A remainder below p is spread over the other groups instead. A micro-batch enters a rank's next
    segment only after it has passed all ranks. So with a group smaller than p, ranks would wait for
    one another and could deadlock.
    """
    num_groups, rest = divmod(num_microbatches, group_size)
    if rest >= num_ranks:
        bounds = [*range(0, num_microbatches, group_size), num_microbatches]
    else:
        num_groups = max(num_groups, 1)
        bounds = [num_microbatches * i // num_groups for i in range(num_groups + 1)]
    return [range(first, end) for first, end in pairwise(bounds)]


def _split(
    order: Iterator[Action], rank: int, num_microbatches: int, *, delayed: int
) -> Iterator[Action]:
    """Yield an order with each WEIGHT ``delayed`` backwards after the micro-batch's backward."""
    delayed = min(delayed, num_microbatches)
    for stage, op, microbatch in order:
        yield Action(stage, op, microbatch)
        if op is Op.BACKWARD and microbatch is not None and microbatch >= delayed:
            yield Action(stage, Op.WEIGHT, microbatch - delayed)
    for microbatch in range(num_microbatches - delayed, num_microbatches):
        yield Action(rank, Op.WEIGHT, microbatch)


def alternate(
    forwards: Sequence[Action], backwards: Sequence[Action], ahead: int
) -> Iterator[Action]:
    """Yield ``ahead`` forwards, then forwards and backwards in turn, then the other backwards."""
    ahead = min(ahead, len(forwards))
    steady = zip(forwards[ahead:], backwards, strict=False)
    return chain(forwards[:ahead], chain.from_iterable(steady), backwards[len(forwards) - ahead :])
