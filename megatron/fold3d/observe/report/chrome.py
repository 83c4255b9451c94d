"""Timelines in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing read.

A process per rank and a thread per lane; spans that overlap within a lane get threads of their own.
Arrows join each message's computation with the one that reads it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from megatron.fold3d.observe.messages import reader_of, source_of
from megatron.fold3d.observe.timeline import LAYER_SYNCS, Lane, Span, Timeline, by_row
from megatron.fold3d.plan.ops import PART_OPS, TABLE

_US = 1e6
_PER_LANE = 100  # threads at most; numbers are for sorting


def to_chrome(timelines: Mapping[str, Timeline]) -> str:
    """Return the JSON of one or more timelines by their names, such as ``measured``."""
    events: list[dict[str, Any]] = []
    processes, flows = count(), count()
    for name, timeline in timelines.items():
        pids = [next(processes) for _ in timeline.ranks]
        for rank, spans in enumerate(timeline.ranks):
            title = f"{name}: rank {rank}" if len(timelines) > 1 else f"rank {rank}"
            events.append(_metadata(pids[rank], 0, "process_name", title))
            for number, (lane, own) in enumerate(by_row(spans).items()):
                events.extend(_lane(timeline, own, lane, pids[rank], number * _PER_LANE))
        events.extend(_arrows(timeline, pids, flows))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _lane(
    timeline: Timeline, spans: Sequence[Span], thread: str, pid: int, first: int
) -> Iterator[dict[str, Any]]:
    free_s: list[float] = []  # when each of the lane's threads is free again
    for span in spans:
        row = next((i for i, end_s in enumerate(free_s) if end_s <= span.start_s), len(free_s))
        if row == len(free_s):
            free_s.append(0.0)
            yield _metadata(pid, first + row, "thread_name", thread)
        free_s[row] = span.end_s
        yield _slice(timeline, span, pid, first + row)


def _slice(timeline: Timeline, span: Span, pid: int, tid: int) -> dict[str, Any]:
    details: dict[str, Any] = {"iteration": span.iteration}
    name = LAYER_SYNCS.get(span.lane, str(span.lane))
    if span.action is not None:
        stage, op, microbatch = span.action
        details |= {"action": str(span.action), "segment": stage // timeline.num_ranks}
        if span.lane is Lane.WAIT:
            name = TABLE[op].waits
        elif span.lane is not Lane.OPTIMIZER:
            name = TABLE[op].title
        if microbatch is not None and op not in PART_OPS:
            details["microbatch"] = microbatch
            name = f"{name} {microbatch}"
    return {
        "ph": "X",
        "name": name,
        "cat": span.lane,
        "pid": pid,
        "tid": tid,
        "ts": round(span.start_s * _US, 3),
        "dur": round(span.duration_s * _US, 3),
        "args": details,
    }


def _metadata(pid: int, tid: int, what: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _arrows(
    timeline: Timeline, pids: Sequence[int], numbers: Iterator[int]
) -> Iterator[dict[str, Any]]:
    """Yield each message as a flow from inside its source's slice to inside its reader's."""
    computed = {
        (span.action, span.iteration): (pid, span)
        for pid, spans in zip(pids, timeline.ranks, strict=True)
        for span in spans
        if span.lane is Lane.COMPUTE
    }
    for message in (span for spans in timeline.ranks for span in spans):
        if message.lane is not Lane.P2P or message.action is None:
            continue
        source = computed.get((source_of(message.action), message.iteration))
        reader = computed.get((reader_of(message.action), message.iteration))
        if source is not None and reader is not None:
            (sender, sent), (receiver, read) = source, reader
            common = {"name": str(message.action), "cat": "message", "id": next(numbers), "tid": 0}
            inside_us = round((sent.start_s + sent.end_s) / 2 * _US, 3)
            yield {**common, "ph": "s", "pid": sender, "ts": inside_us}
            arrives_us = round(read.start_s * _US, 3)
            yield {**common, "ph": "f", "bp": "e", "pid": receiver, "ts": arrives_us}
