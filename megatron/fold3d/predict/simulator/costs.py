"""Costs: the seconds that each action of a plan takes on its own.

Costs are estimated or measured. They include neither waiting nor the sharing of links, which the
simulator adds.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from reprlib import repr as shortened
from typing import Self

from megatron.fold3d.observe.fields import is_number
from megatron.fold3d.plan.ir import Op, PlanError

_NEEDED = ("forward_s", "backward_s")
_PARTS = {
    "weight_s": "backward",
    "recompute_s": "backward",
    "tp_sync_s": "forward",
    "ep_sync_s": "forward",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds per action; tuples hold one number per stage, and empty ones mean zero."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    weight_s: tuple[float, ...] = ()
    """The part of ``backward_s`` for weight gradients: the time of a W, if the plan has any."""
    recompute_s: tuple[float, ...] = ()
    """The part of ``backward_s`` for recomputation: the time of an R, if the plan has any."""
    tp_sync_s: tuple[float, ...] = ()
    """The part of ``forward_s`` for tensor-parallel collectives. A backward has as much, or twice
    as much if it recomputes. In a pair, one micro-batch's computation hides the other's TP.sync."""
    ep_sync_s: tuple[float, ...] = ()
    """The part of ``forward_s`` for all-to-alls of experts. Backwards and pairs follow the rules of
    ``tp_sync_s``."""
    ep_sync_on_nic: bool = False
    """Whether all-to-alls leave the node, so that they share the NIC with messages and DP.sync."""
    collectives: tuple[int, ...] = ()
    """The number of collectives of ``tp_sync_s`` and ``ep_sync_s`` in a forward. The ends of a pair
    hide only a part of one collective; zero, or an empty tuple, ignores the ends."""
    split_s: float = 0.0
    """Overhead of a separate W, in addition to ``weight_s``."""
    p2p_s: float = 0.0
    """One message at the full rate of a NIC."""
    p2p_latency_s: float = 0.0
    """Latency of a message, before it uses any bandwidth."""
    p2p_local_s: float = 0.0
    """One message between two ranks behind the same NIC; it does not use the NIC."""
    sends_are_buffered: bool = False
    """Whether a sender that waits for a send waits only until the message is buffered."""
    grad_sync_s: tuple[float, ...] = ()
    """DP.sync of a stage's gradients at the full rate of the rank's NIC."""
    reduced_in_iteration_s: tuple[float, ...] = ()
    """The part of ``grad_sync_s`` that REDUCE_KEPT reduces within the iteration."""
    rings_are_buffered: bool = False
    """Whether a message slows DP.sync down in one direction only: see `policy.grad_sync_cuts`."""
    grad_sync_local: bool = False
    """Whether DP.sync stays inside the node, so that messages have the NIC to themselves."""
    param_gather_s: tuple[float, ...] = ()
    optimizer_s: tuple[float, ...] = ()
    """The optimizer's step of a stage."""
    offload_s: tuple[float, ...] = ()
    """The copy of one micro-batch's saved activations of a stage to the host."""
    reload_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            value, per_stage = getattr(self, field.name), field.default in (MISSING, ())
            if per_stage != isinstance(value, tuple | list):
                form = "a list of finite numbers, one per stage" if per_stage else "one number"
                raise ValueError(f"found {field.name}={value!r}; it is {form}")
            if isinstance(value, list):  # from a JSON or TOML file
                object.__setattr__(self, field.name, tuple(value))

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        *,
        forward_s: float = 1.0,
        backward_s: float = 2.0,
        recompute_s: float = 0.0,
        tp_sync_s: float = 0.0,
        grad_sync_s: float = 0.0,
        p2p_s: float = 0.0,
        p2p_latency_s: float = 0.0,
    ) -> Self:
        """Return the same costs for every stage; the defaults are the units of the usual diagrams.

        Weight gradients take half of a backward without recomputation, since they need as many
        multiplications as a forward.
        """
        return cls(
            forward_s=(forward_s,) * num_stages,
            backward_s=(backward_s,) * num_stages,
            weight_s=((backward_s - recompute_s) / 2,) * num_stages,
            recompute_s=(recompute_s,) * num_stages,
            tp_sync_s=(tp_sync_s,) * num_stages,
            grad_sync_s=(grad_sync_s,) * num_stages,
            p2p_s=p2p_s,
            p2p_latency_s=p2p_latency_s,
        )

    def check(self, num_stages: int) -> None:
        """Check that the costs fit a plan with this number of stages.

        Raises:
            PlanError: a tuple has the wrong length, or a number is negative.
        """
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            numbers = value if isinstance(value, tuple) else (value,)
            if not all(isinstance(n, bool) or (is_number(n) and n >= 0) for n in numbers):
                raise PlanError(
                    f"found {name}={shortened(value)}; seconds are zero or more, each a finite "
                    "number"
                )
            optional = not numbers and name not in _NEEDED
            if isinstance(value, tuple) and len(numbers) != num_stages and not optional:
                raise PlanError(
                    f"found {len(numbers)} numbers in {name}; a plan of {num_stages} stages "
                    "needs one for each"
                )
        for name, kind in _PARTS.items():
            for part_s, whole_s in zip(
                getattr(self, name), getattr(self, f"{kind}_s"), strict=False
            ):
                if part_s > whole_s:
                    raise PlanError(
                        f"found {part_s!r} in {name}; it is a part of a {kind} of {whole_s!r}"
                    )
        both = zip(self.weight_s, self.recompute_s, self.backward_s, strict=False)
        for weight_s, recompute_s, whole_s in both:
            if weight_s + recompute_s > whole_s:
                raise PlanError(
                    f"found {weight_s!r} in weight_s and {recompute_s!r} in recompute_s; together "
                    f"they are a part of a backward of {whole_s!r}"
                )

    @property
    def input_s(self) -> tuple[float, ...]:
        """The part of ``backward_s`` without weight gradients: input gradients, recomputation."""
        weight_s = self.weight_s or (0.0,) * len(self.backward_s)
        return tuple(whole_s - s for whole_s, s in zip(self.backward_s, weight_s, strict=True))

    def passes(self, stage: int, op: Op, *, early: bool = False) -> int:
        """Return how many times an action runs the collectives of a forward.

        Args:
            early: whether a separate action recomputes ahead of the backward.
        """
        recomputes = op is Op.BACKWARD and not early and any(self.recompute_s[stage : stage + 1])
        return 2 if recomputes else 1

    def in_shards(self, parameter_share: float) -> Self:
        """Return costs with reduce-scatters and all-gathers in place of all-reduces.

        Args:
            parameter_share: bytes of a parameter divided by bytes of its gradient; it is not used
                if ``param_gather_s`` is given.
        """
        halves = tuple(seconds / 2 for seconds in self.grad_sync_s)
        gathers_s = self.param_gather_s or tuple(s * parameter_share for s in halves)
        return replace(self, grad_sync_s=halves, param_gather_s=gathers_s)

    def gathered_in_steps(self) -> Self:
        """Return the costs of a run whose steps end with the all-gather of their parameters."""
        if not self.param_gather_s:
            return self
        nothing = (0.0,) * len(self.param_gather_s)
        both = zip(self.optimizer_s or nothing, self.param_gather_s, strict=True)
        return replace(self, optimizer_s=tuple(map(sum, both)), param_gather_s=())

    def with_replicated(self, stages: Collection[int]) -> Self:
        """Return a distributed optimizer's costs if every replica steps ``stages`` in full.

        These stages are all-reduced and not gathered. A ring's all-reduce takes as long as a
        reduce-scatter and an all-gather of the gradients.
        """
        if not stages:
            return self
        return replace(
            self,
            grad_sync_s=tuple(
                s * (2 if stage in stages else 1) for stage, s in enumerate(self.grad_sync_s)
            ),
            param_gather_s=tuple(
                0.0 if stage in stages else s for stage, s in enumerate(self.param_gather_s)
            ),
        )

    def with_coded_sums(self, shares: Sequence[float], whole: Collection[int]) -> Self:
        """Return a distributed optimizer's costs if gradients are summed to shards in a code.

        Args:
            shares: by stage, which part of the time of whole sums they take; empty is all of it.
            whole: stages that every replica steps in full, which are all-reduced.
        """
        if not shares:
            return self
        both = enumerate(zip(self.grad_sync_s, shares, strict=True))
        sums_s = tuple(s if stage in whole else s * share for stage, (s, share) in both)
        return replace(self, grad_sync_s=sums_s)

    def to_json(self) -> str:
        """Return a JSON object with one key per field, which ``--costs`` reads by `from_file`."""
        return json.dumps(asdict(self), indent=1)
