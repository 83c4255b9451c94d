"""What training makes of the planner's choices: the parts of the paper it lacks, taken away.

The planner gives AIAO all of the paper. Training today runs its order with non-blocking transfers;
DP.sync ends within the iteration and shares the links evenly, and nothing is offloaded. Its order
is also what stock Megatron runs with one group of all micro-batches, which it calls breadth-first;
but stock waits for each forward's transfer. That twin belongs to the best of stock.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron.fold3d.analysis.candidates import Candidate
from megatron.fold3d.analysis.choices import Choice
from megatron.fold3d.analysis.cluster import Cluster
from megatron.fold3d.analysis.estimate import Estimate, estimate
from megatron.fold3d.analysis.exposure import exposure, mean
from megatron.fold3d.analysis.memory import memory
from megatron.fold3d.analysis.model import ModelShape
from megatron.fold3d.analysis.planner import USABLE_MEMORY
from megatron.fold3d.analysis.simulate import simulate
from megatron.fold3d.plan.lowering import add_grad_sync
from megatron.fold3d.plan.schedules import build


@dataclass(frozen=True, slots=True)
class AsBuilt:
    """Judges candidates of one model on one cluster."""

    shape: ModelShape
    cluster: Cluster

    @property
    def usable_bytes(self) -> float:
        """What a run may hold of a GPU's memory: the planner's share of it."""
        return self.cluster.gpu_memory_bytes * USABLE_MEMORY

    def aiao(self, candidate: Candidate) -> Choice | None:
        """Return what an AIAO candidate does in training today; None if it does not run."""
        if lacking(candidate, deferred=False):
            return None
        return self._judge(candidate, self._estimate(candidate))

    def stock_twin(self, candidate: Candidate) -> Choice | None:
        """Return stock Megatron's run of an AIAO candidate's order; None if it refuses it."""
        if lacking(candidate, deferred=False) or candidate.num_microbatches < candidate.num_ranks:
            return None
        known = self._estimate(candidate)
        costs = known.costs
        several_nodes = len(set(known.nic_of_rank)) > 1
        message_s = costs.p2p_latency_s + (costs.p2p_s if several_nodes else costs.p2p_local_s)
        *senders, last = costs.forward_s
        waiting = replace(costs, forward_s=(*(s + message_s for s in senders), last))
        return self._judge(candidate, replace(known, costs=waiting))

    def _estimate(self, candidate: Candidate) -> Estimate:
        return estimate(
            self.shape,
            self.cluster,
            candidate.setup,
            num_ranks=candidate.num_ranks,
            num_segments=candidate.num_segments,
        )

    def _judge(self, candidate: Candidate, known: Estimate) -> Choice:
        order = build(
            "aiao",
            num_ranks=candidate.num_ranks,
            num_segments=candidate.num_segments,
            num_microbatches=candidate.num_microbatches,
        )
        timeline = simulate(
            add_grad_sync(order),
            known.costs,
            nic_of_rank=known.nic_of_rank,
            preemptive=False,
            flush=True,
        )
        peak = max(rank.device.peak_bytes for rank in memory(timeline, known.footprint))
        return Choice(candidate, timeline.period_s, peak, mean(exposure(timeline)))


def lacking(candidate: Candidate, *, deferred: bool) -> tuple[str, ...]:
    """Return what a candidate needs that training does not have."""

    def needs() -> Iterator[str]:
        if candidate.is_stock:
            return
        if deferred:
            yield "DP.sync that reaches into the next iteration"
        if candidate.offload:
            yield "offload"
        if candidate.num_ranks == 1:
            yield "several segments without a pipeline"

    return tuple(needs())
