"""A run's measurements of its computations, links and memory; all ranks have the same."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Self

from megatron.fold3d.plan.memory import HeldSizes

_USABLE = 0.9  # share of free memory; fragmentation, other processes and variation take the rest


@dataclass(frozen=True, slots=True)
class Line:
    """The seconds of a message on a lane: a latency, plus a time for each byte."""

    s_per_byte: float = 0.0
    latency_s: float = 0.0

    @classmethod
    def through(cls, small: tuple[float, float], large: tuple[float, float]) -> Self:
        """Return the line through two messages, each given as (bytes, seconds).

        If the large one was faster, which noise causes, all of its time counts as its bytes'.
        """
        (few, few_s), (many, many_s) = small, large
        s_per_byte = (many_s - few_s) / (many - few) if many_s > few_s else many_s / many
        return cls(s_per_byte, max(0.0, few_s - s_per_byte * few))

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds of a message with this many bytes."""
        return self.latency_s + num_bytes * self.s_per_byte

    def __str__(self) -> str:
        return f"{self.s_per_byte * 1e9:.3g} ns a byte after {self.latency_s * 1e3:.3g} ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTimes:
    """Seconds of one micro-batch in each stage, of a transfer and of DP.sync, and bytes held."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    """Without recomputation and weight gradients that are separate actions of the plan."""
    recompute_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    optimizer_s: tuple[float, ...] = ()
    """The optimizer's step of a stage; zero if no step was measured."""
    transfer_s: float
    """One message without its latency, measured while every rank sends one to the next."""
    transfer_latency_s: float = 0.0
    grad_sync_s: tuple[float, ...]
    """DP.sync of a stage's gradients, as an all-reduce with its latency."""
    param_gather_s: tuple[float, ...] = ()
    """The all-gather of a stage's parameters with its latency; empty if not measured."""
    sum_shares: tuple[float, ...] = ()
    """Which part of a stage's gradients its sums to shards send; empty if nothing codes them."""
    lanes: Mapping[str, Line] = field(default_factory=dict)
    """The measured line of each lane, by the lane's name in prose; zero if the run has none."""
    rings_are_buffered: bool = False
    """Whether a message slows DP.sync down only in the message's direction."""
    held: HeldSizes | None = None
    """Bytes of micro-batches; None if the device reports no memory, as a CPU."""
    room_bytes: float = inf
    """Bytes that the fullest rank may use beyond its peak."""
    other_shard_bytes: tuple[float, ...] = ()
    """By segment, the additional bytes of a rank if every replica steps the segment in full."""

    def __str__(self) -> str:
        named = {
            "F": max(self.forward_s),
            "B": max(self.backward_s),
            "R": max(self.recompute_s),
            "W": max(self.weight_s),
            "step": max(self.optimizer_s, default=0.0),
            "transfer": self.transfer_s + self.transfer_latency_s,
            "DP.sync": max(self.grad_sync_s),
        }
        of_stage = [f"{name} {s * 1e3:.3g} ms" for name, s in named.items() if s]
        of_lanes = [f"{name} {line}" for name, line in self.lanes.items() if line.s_per_byte]
        return ", ".join(of_stage + of_lanes)


def usable_bytes(free_bytes: float) -> float:
    """Return the bytes of free memory that a prediction may use."""
    return _USABLE * max(0.0, free_bytes)
