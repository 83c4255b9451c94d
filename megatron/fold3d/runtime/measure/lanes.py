"""What a message takes on each lane of a job, or between two ranks: its latency, and each byte.

A lane is what messages of one kind share: the links of DP.sync, of transfers in the pipeline, of
tensor parallelism, the copies to the host. Two sizes of messages give the line through both.

Keeps one invariant: the order of collectives is the same on all ranks, and each lane is measured
on all of them before the next one begins. A rank sends and receives in one launch, so nothing waits
behind a receive, even where all streams of a device share one hardware queue.
"""

from collections.abc import Callable
from functools import partial
from itertools import combinations

import torch
import torch.distributed as dist

from megatron.fold3d.policy.measured_times import Line
from megatron.fold3d.runtime.agreement import slowest
from megatron.fold3d.runtime.measure.timing import seconds

_SMALLEST_BYTES, _LARGEST_BYTES = 1 << 16, 1 << 25
_FACTOR = 8  # from one size to the next
_ENOUGH_S = 0.02  # a message that takes so long shows a link's rate; a larger one only takes longer
_MORE, _ROUNDS = 4, 3
_ALL_PAIRS = 8  # ranks; of more, only neighbours in a ring are measured
_ROUND_TRIPS, _PAIR_BYTES = 20, 4 << 20

Send = Callable[[], object]
Link = tuple[int, int, float, float]
"""From a rank to another: its latency in seconds, and bytes a second."""


def transfers(group: dist.ProcessGroup, largest: int, device: torch.device) -> Line:
    """Measure messages of a pipeline, of which every rank sends one to the next at once.

    Args:
        largest: the bytes of a message of the run, beyond which nothing is measured.
    """
    if group.size() == 1:
        return Line()
    ranks, here = dist.get_process_group_ranks(group), group.rank()
    after, before = ranks[(here + 1) % len(ranks)], ranks[here - 1]

    def sending(num_bytes: int) -> Send:
        sent, received = (
            torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)
        )

        def send() -> None:
            # Receives first: over gloo a receive's announcement would queue behind bulk data.
            for work in dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.irecv, received, before, group),
                    dist.P2POp(dist.isend, sent, after, group),
                ]
            ):
                work.wait()

        return send

    return line(sending, largest, device)


def all_reduces(group: dist.ProcessGroup, largest: int, device: torch.device) -> Line:
    """Measure all-reduces in all groups at once; ``largest`` is as in `transfers`."""

    def sending(num_bytes: int) -> Send:
        data = torch.zeros(-(-num_bytes // 4), device=device)
        return lambda: dist.all_reduce(data, group=group)

    return line(sending, largest, device) if group.size() > 1 else Line()


def gathers(group: dist.ProcessGroup, largest: int, device: torch.device) -> Line:
    """Measure all-gathers in all groups at once, by the bytes that each rank has at their end."""

    def sending(num_bytes: int) -> Send:
        shard = torch.zeros(-(-num_bytes // group.size()), dtype=torch.uint8, device=device)
        whole = shard.repeat(group.size())
        return lambda: dist.all_gather_into_tensor(whole, shard, group=group)

    return line(sending, largest, device) if group.size() > 1 else Line()


def host_copies(device: torch.device) -> Line:
    """Measure copies from the device to pinned memory of the host."""

    def sending(num_bytes: int) -> Send:
        data = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        return lambda: host.copy_(data, non_blocking=True)

    return line(sending, _LARGEST_BYTES, device)


def line(sending: Callable[[int], Send], largest: int, device: torch.device) -> Line:
    """Return the line through the two largest of some sizes; all ranks call this together.

    Sizes grow up to the run's own until a message takes long enough, but there are two.

    Args:
        sending: makes, of a number of bytes, what starts a message of so many.
        largest: the bytes beyond which nothing is measured.
    """
    sizes = [max(_FACTOR, min(largest, _LARGEST_BYTES))]
    while len(sizes) < 2 or sizes[0] // _FACTOR >= _SMALLEST_BYTES:
        sizes.insert(0, sizes[0] // _FACTOR)
    points: list[tuple[float, float]] = []
    for size in sizes:
        points.append((size, message_s(sending(size), device)))
        if len(points) > 1 and points[-1][1] > _ENOUGH_S:
            break
    return Line.through(*points[-2:])


def message_s(send: Send, device: torch.device) -> float:
    """Return the seconds of one of several messages in a row, on the slowest rank.

    It is what some more messages take than one: the start from an idle device and the synchronize
    at the end are in both. If noise has made one as slow as several, it is their mean.
    """

    def several(count: int) -> float:
        def work() -> None:
            for _ in range(count):
                send()

        return seconds(work, device, _ROUNDS)

    one_s, many_s = slowest([several(1), several(1 + _MORE)], device)
    return (many_s - one_s) / _MORE if many_s > one_s else many_s / (1 + _MORE)


def pairs(world_size: int) -> list[tuple[int, int]]:
    """Return the pairs to measure: all of them in a small job, else the neighbours in a ring."""
    if world_size <= _ALL_PAIRS:
        return list(combinations(range(world_size), 2))
    return [(rank, (rank + 1) % world_size) for rank in range(world_size)]


def links(device: torch.device) -> list[Link]:
    """Return the links between `pairs` of ranks, the same on every rank; all ranks call this.

    While one pair is measured the others wait, so the network is otherwise idle.
    """
    word = torch.zeros(1, device=device)
    data = torch.zeros(_PAIR_BYTES, dtype=torch.uint8, device=device)
    found = []
    for source, target in pairs(dist.get_world_size()):
        times_s = [0.0, 0.0]
        if dist.get_rank() in (source, target):
            times_s = [
                seconds(partial(_round_trip, there, word, source, target), device, rounds)
                for there, rounds in ((word, _ROUND_TRIPS), (data, _ROUNDS))
            ]
        trip_s, data_s = slowest(times_s, device)
        bytes_per_s = _PAIR_BYTES / max(1e-9, data_s - trip_s / 2)
        found.append((source, target, trip_s / 2, bytes_per_s))
    return found


def _round_trip(there: torch.Tensor, back: torch.Tensor, source: int, target: int) -> None:
    """Send ``there`` and get ``back``, or the other way round; wait until the host can read it."""
    if dist.get_rank() == source:
        dist.send(there, target)
        dist.recv(back, target)
    else:
        dist.recv(there, source)
        dist.send(back, source)
    back.item()  # a device's receive is only queued when `recv` returns
