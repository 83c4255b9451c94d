"""Memory over time: the bytes that each rank of a timeline holds, on the device and on the host.

A forward's saved activations are held from its start to the end of its backward. Offloaded ones are
on both sides while they are copied, and on the host in between. The operands of delayed weight
gradients are held until these are computed. Early recomputed activations are held from the start of
their recomputation to the end of their backward. A stage's gradients may be freed before its first
forward, until its first backward.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from megatron.fold3d.observe.timeline import Lane, Span, Timeline
from megatron.fold3d.plan.memory import changes
from megatron.fold3d.plan.ops import PART_OPS, TABLE, Op, Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes of the actions of a plan; one number per rank or per stage."""

    static_bytes: tuple[float, ...]
    """Per rank: parameters, gradients, optimizer."""
    saved_bytes: tuple[float, ...]
    """Per stage: what one micro-batch's forward keeps."""
    working_bytes: tuple[float, ...] = ()
    """Per stage: what a backward needs beside it while it runs."""
    delayed_bytes: tuple[float, ...] = ()
    """Per stage: what a backward keeps for its delayed weight gradients."""
    recomputed_bytes: tuple[float, ...] = ()
    """Per stage: what early recomputation holds for the backward, of all layers."""
    freed_bytes: tuple[float, ...] = ()
    """Per stage: static bytes of its rank that are freed from its forwards to its backwards."""
    step_bytes: tuple[float, ...] = ()
    """Per rank: bytes after all computation that replace its static bytes, if they are more."""


Curve = Mapping[float, float]
"""Bytes, by the time in seconds from which on they are held."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The bytes that one rank holds over time."""

    device: Curve
    host: Curve

    @property
    def device_peak(self) -> float:
        """The most bytes that the device ever held."""
        return max(self.device.values())

    @property
    def host_peak(self) -> float:
        """The most bytes that the host ever held."""
        return max(self.host.values())


def memory(timeline: Timeline, footprint: Footprint) -> tuple[Memory, ...]:
    """Return, per rank, the memory that a timeline takes."""
    return tuple(
        Memory(
            _curve(
                static,
                chain(_device_changes(spans, footprint), _at_step(spans, step - static)),
            ),
            _curve(0.0, _host_changes(spans, footprint.saved_bytes)),
        )
        for static, step, spans in zip(
            footprint.static_bytes,
            footprint.step_bytes or footprint.static_bytes,
            timeline.ranks,
            strict=True,
        )
    )


_Change = tuple[float, float]  # when, by how many bytes


def _device_changes(spans: Sequence[Span], footprint: Footprint) -> Iterator[_Change]:
    sizes = {
        "saved": footprint.saved_bytes,
        "delayed": footprint.delayed_bytes,
        "working": footprint.working_bytes,
        "recomputed": footprint.recomputed_bytes,
    }
    held = [span for span in spans if span.action and span.lane in (Lane.COMPUTE, Lane.COPY)]
    program = tuple(span.action for span in held if span.action)
    last = max((a.microbatch or 0 for a in program if a.op not in PART_OPS), default=0)
    freed = dict[int, float]()  # by stage, what its first backward takes again
    for span, (action, begin, end) in zip(held, changes(program, 1 + last), strict=True):
        for at_s, some in ((span.start_s, begin), (span.end_s, end)):
            for what, stage, number in some:
                if by_stage := sizes.get(what):
                    yield at_s, number * by_stage[stage]
        if footprint.freed_bytes and action.op is Op.FORWARD and action.microbatch == 0:
            freed[action.stage] = footprint.freed_bytes[action.stage]
            yield span.start_s, -freed[action.stage]
        elif action.op is Op.BACKWARD and action.stage in freed:
            yield span.start_s, freed.pop(action.stage)


def _at_step(spans: Sequence[Span], more_bytes: float) -> Iterator[_Change]:
    if more_bytes:
        yield (
            max((span.end_s for span in spans if span.lane is Lane.COMPUTE), default=0.0),
            more_bytes,
        )


def _host_changes(spans: Sequence[Span], saved_bytes: Sequence[float]) -> Iterator[_Change]:
    for _, start_s, end_s, action, _ in spans:
        if action is not None and TABLE[action.op].place is Place.TO_HOST:
            yield start_s, saved_bytes[action.stage]
        elif action is not None and TABLE[action.op].place is Place.TO_DEVICE:
            yield end_s, -saved_bytes[action.stage]


def _curve(static_bytes: float, changes: Iterator[_Change]) -> Curve:
    """Sum the changes; at one time, memory is freed before more is taken."""
    ordered = [(0.0, static_bytes), *sorted(changes)]
    totals = accumulate(change for _, change in ordered)
    return {time_s: total for (time_s, _), total in zip(ordered, totals, strict=True)}
