"""Lower bounds on an iteration's time, over all orders of computation, from compute and links.

`Bounds.order_s` ignores DP.sync. `Bounds.sync_s` lets DP.sync reach into the next iteration, and
`Bounds.norm_s` does so only as far as a step that waits for the gradients' norm permits.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import sub

from megatron.fold3d.plan.ir import WHOLE, Plan
from megatron.fold3d.plan.passes.early_grad_sync import stages_in_parts
from megatron.fold3d.predict.simulator.costs import Costs


def order_s(
    costs: Costs, num_microbatches: int, nic_of_rank: Sequence[int], *, early: bool = False
) -> float:
    """Return the seconds that any order of computation takes at least, without DP.sync.

    Compute bound: the first micro-batch reaches a rank through the earlier stages. Then the rank
    computes all of its work. Then its last input gradient returns through the earlier stages, while
    the rank may compute weight gradients. Link bound: a NIC sends the results of all micro-batches,
    in both directions. Other ranks compute before the first and after the last of these sends.

    Args:
        early: whether ranks may recompute before a gradient arrives.
    """
    nics, ranks, stages = nic_of_rank, len(nic_of_rank), range(len(costs.forward_s))
    weight_s = costs.weight_s or (0.0,) * len(stages)
    input_s = back_s = costs.input_s
    if early:
        back_s = tuple(map(sub, input_s, costs.recompute_s))

    def hop_s(rank: int) -> float:
        """Return the seconds of a message from a rank to the next."""
        local = nics[rank % ranks] == nics[(rank + 1) % ranks]
        return costs.p2p_latency_s + (costs.p2p_local_s if local else costs.p2p_s)

    hops_s = [0.0, *accumulate(map(hop_s, range(ranks - 1)))]
    way_in_s = [*map(sum, zip(accumulate(costs.forward_s, initial=0.0), hops_s, strict=False))]
    way_out_s = [*map(sum, zip(accumulate(back_s, initial=0.0), hops_s, strict=False))]
    bound_s = 0.0
    for rank in range(ranks):
        own = stages[rank::ranks]
        others_wait_s = num_microbatches * sum(costs.forward_s[s] + input_s[s] for s in own)
        left_s = num_microbatches * sum(weight_s[s] for s in own)
        bound_s = max(bound_s, way_in_s[rank] + others_wait_s + max(left_s, way_out_s[rank]))

    for nic in set(nics):
        num_sent = sum(
            (nics[s % ranks] == nic) + (nics[(s + 1) % ranks] == nic)
            for s in stages[:-1]
            if nics[s % ranks] != nics[(s + 1) % ranks]
        )
        here = [rank for rank in range(ranks) if nics[rank] == nic]
        first_s = min(way_in_s[rank] + costs.forward_s[rank] for rank in here)
        # The reader of the last send is the previous rank, or one further from the end.
        last_s = min(way_out_s[max(0, r - 1)] + back_s[max(0, r - 1)] for r in here)
        if num_sent:
            link_s = num_microbatches * num_sent * costs.p2p_s + costs.p2p_latency_s
            bound_s = max(bound_s, first_s + link_s + last_s)
    return bound_s


class Bounds:
    """Lower bounds on the seconds of an iteration, for any order with a plan's sizes.

    Args:
        plan: gives the numbers of ranks, segments and micro-batches; its order does not count.
        costs: costs of the plan's stages, with the replicated segments already in them.
    """

    def __init__(self, plan: Plan, costs: Costs, nic_of_rank: Sequence[int] | None = None) -> None:
        self._plan, self._costs = plan, costs
        self._nics = tuple(nic_of_rank or range(plan.num_ranks))
        shared = nic_of_rank is not None and len(set(nic_of_rank)) < plan.num_ranks
        self._ranks = [_Rank(plan, costs, number, shared) for number in range(plan.num_ranks)]

    @property
    def sync_s(self) -> float | None:
        """The bound with DP.sync if no step waits for the norm; None if there is no DP.sync."""
        return self._synced_s(waits_for_norm=False)

    @property
    def norm_s(self) -> float | None:
        """The bound with DP.sync if every step waits for the gradients' norm, as with clipping."""
        return self._synced_s(waits_for_norm=True)

    @property
    def order_s(self) -> float:
        """The bound without DP.sync."""
        return order_s(self._costs, self._plan.num_microbatches, self._nics)

    def _synced_s(self, *, waits_for_norm: bool) -> float | None:
        if not any(self._costs.grad_sync_s):
            return None
        return max(self.order_s, self.with_sync_s(waits_for_norm=waits_for_norm))

    def with_sync_s(self, *, waits_for_norm: bool) -> float:
        """Return the bound by DP.sync on an iteration between many others.

        Once in an iteration a rank has nothing to reduce or gather: from the end of the last
        gather, or of the last carried DP.sync, until the first gradients are complete. In this gap
        a model chunk's forwards and backwards have to run, and each micro-batch has to return from
        the last stage. The messages of other chunks share the link with DP.sync, or their
        computations prolong the gap too.

        If the step waits for the gradients' norm, all reductions end before the step, and all
        gathers follow it. So reductions overlap only backwards. Gathers overlap only forwards, and
        backwards after these. A rank computes nothing until the parameters of its first chunk are
        gathered. After the last backward of this chunk only weight gradients are left. They alone
        overlap the chunk's reduction, and have to be reduced themselves.

        If the plan starts DP.sync between weight gradients, the bound allows this to any order:
        some gradients of a chunk may then be complete before most of its weight gradients.

        Gradients are reduced, and parameters gathered, chunk by chunk, as in the simulator and in
        Megatron with the distributed optimizer. Megatron cuts the first rank's first chunk into
        buckets, so this chunk's last backward counts as nothing. A large chunk that is all-reduced
        may have buckets too, which the bound and the simulator leave out. Weight gradients between
        which DP.sync starts follow the chunk's backwards, and one of them precedes DP.sync.
        """
        bound_s = 0.0
        for rank in self._ranks:
            bound_s = max(bound_s, rank.reductions_s + rank.gathers_s + max(rank.idles_s()))
            if waits_for_norm:
                bound_s = max(
                    bound_s,
                    rank.reductions_s + max(rank.first_gradients_s(self._ranks[-1])),
                    rank.gathered_s() + rank.backwards_s + rank.exposed_s(),
                    rank.start_s + rank.forwards_s + rank.backwards_s + rank.exposed_s(),
                )
        return bound_s


class _Rank:
    """The seconds of a rank that hold for any order."""

    def __init__(self, plan: Plan, costs: Costs, number: int, shared: bool) -> None:
        none = (0.0,) * plan.num_stages
        self.number, self.num_ranks, self.num_stages = number, plan.num_ranks, plan.num_stages
        self.microbatches, self.costs = plan.num_microbatches, costs
        # Micro-batches of weight gradients that are left when a chunk's first part is complete.
        self.behind_first = self.microbatches * (1 - WHOLE // self.microbatches / WHOLE)
        self.own = range(number, plan.num_stages, plan.num_ranks)
        self.weight_s = costs.weight_s or none
        self.early_s = self.weight_s if any(map(stages_in_parts, plan.programs)) else none
        self.input_s = costs.input_s
        self.reduce_s, self.gather_s = costs.grad_sync_s or none, costs.param_gather_s or none
        self.reductions_s = sum(self.reduce_s[s] for s in self.own)
        self.gathers_s = sum(self.gather_s[s] for s in self.own)
        self.forwards_s = self.microbatches * sum(costs.forward_s[s] for s in self.own)
        self.backwards_s = self.microbatches * sum(costs.backward_s[s] for s in self.own)
        apart = plan.num_ranks == 1 or shared or costs.grad_sync_local
        self.send_s = 0.0 if apart else costs.p2p_s  # on the link that DP.sync uses
        self.hop_s = 0.0 if shared else costs.p2p_s + costs.p2p_latency_s
        self.start_s = self._start_s()

    def _start_s(self) -> float:
        """Return the seconds from the step until the rank can compute its first forward."""
        if self.number == 0:
            return max(0.0, self.gather_s[0] - self.costs.forward_s[0])  # overlaps its own buckets
        first_s = max(self.gather_s[0], self.costs.forward_s[0])
        others_s = sum(self.costs.forward_s[1 : self.number])
        return max(first_s + others_s + self.number * self.hop_s, self.gather_s[self.number])

    def _shortest_s(self, by_stage: Sequence[float]) -> float:
        return min(by_stage[s] for s in self.own)

    @property
    def _way_out_s(self) -> float:
        """The seconds of a micro-batch from the rank's last stage to the model's last stage."""
        stages = range(self.own[-1], self.num_stages - 1)
        return sum(self.costs.forward_s[s] + self.hop_s for s in stages)

    @property
    def _way_back_s(self) -> float:
        """The seconds from the model's last stage back until the rank's last stage is complete."""
        own = self.own[-1]
        stages = range(own + 1, self.num_stages)
        own_s = self.input_s[own] if own else 0.0  # cut into buckets
        return sum(self.input_s[s] for s in stages[:-1]) + len(stages) * self.hop_s + own_s

    def idles_s(self) -> Iterator[float]:
        """Yield bounds on the gap without DP.sync, plus the time that messages add to either."""
        m, costs = self.microbatches, self.costs
        in_buckets = self.number == 0 and len(self.own) == 1
        forwards_s = (m - in_buckets) * self._shortest_s(costs.forward_s)
        yield (
            forwards_s
            + self._first_backwards_s()
            + self._sends_f_s(len(self.own))
            + self._sends_b_s()
        )
        if self.number < self.num_ranks - 1 and not in_buckets:
            yield (
                self._way_out_s
                + m * (costs.forward_s[-1] + self.input_s[-1])
                + self._way_back_s
                + self._beside_s(costs.forward_s, self._way_out_s)
                + self._beside_s(self.input_s, self._way_back_s)
            )

    def first_gradients_s(self, last: "_Rank") -> Iterator[float]:
        """Yield bounds from the step until a reduction starts, plus the time that messages add."""
        yield self.start_s + self.forwards_s + self._first_backwards_s() + self._sends_b_s()
        if self.number < last.number:
            yield (
                last.start_s
                + last.forwards_s
                + self.microbatches * self.input_s[-1]
                + self._way_back_s
                + self._beside_s(self.input_s, self._way_back_s)
            )

    def gathered_s(self) -> float:
        """Return a bound from the step until the forwards that follow the last gather have run."""
        gathered = [chunk for chunk, s in enumerate(self.own) if self.gather_s[s]]
        if not gathered:
            return 0.0
        forward_s = [self.costs.forward_s[s] for s in self.own]
        forwards_s = self.microbatches * sum(forward_s[gathered[-1] :])
        if gathered[-1] == self.number == 0:
            forwards_s -= forward_s[0]  # cut into buckets
        return self.gathers_s + forwards_s + self._sends_f_s(gathered[-1] + 1)

    def exposed_s(self) -> float:
        """Return the seconds of the first chunk's reduction that no computation can overlap.

        Weight gradients of other chunks may follow the first chunk's last backward. They help only
        if they take longer to compute than to reduce.
        """
        m, first = self.microbatches, self.number
        own_s = max(self.behind_first * self.early_s[first], self._bucketed_s(first))
        others_s = sum(max(0.0, m * self.weight_s[s] - self.reduce_s[s]) for s in self.own[1:])
        return max(0.0, self.reduce_s[first] - own_s - others_s)

    def _bucketed_s(self, stage: int) -> float:
        """Return the seconds of a stage's last backward that may overlap the stage's reduction."""
        return self.costs.backward_s[stage] if stage == 0 else 0.0

    def _first_backwards_s(self) -> float:
        """Return the least seconds of a chunk's backwards before its reduction can start."""
        m, backward_s, early_s = self.microbatches, self.costs.backward_s, self.early_s
        return min(
            m * backward_s[s] - max(self._bucketed_s(s), self.behind_first * early_s[s])
            for s in self.own
        )

    def _sends_f_s(self, num_chunks: int) -> float:
        """Return the seconds that sending results of the first chunks adds to gathers or forwards.

        Results of the last two of these chunks may leave in the gap without DP.sync, at no cost.
        Another result either leaves beside DP.sync, or a dependent forward of the rank runs in the
        gap. The bound takes the shorter of the two.
        """
        num_chunks = min(num_chunks, sum(s + 1 < self.num_stages for s in self.own))
        forward_s = self._shortest_s(self.costs.forward_s)
        return self.microbatches * max(0, num_chunks - 2) * min(self.send_s, forward_s)

    def _sends_b_s(self) -> float:
        """Return the seconds that sends of input gradients add; the first chunk's are free."""
        num_chunks = max(0, sum(s > 0 for s in self.own) - 1)
        return self.microbatches * num_chunks * min(self.send_s, self._shortest_s(self.input_s))

    def _beside_s(self, seconds: Sequence[float], free_s: float) -> float:
        """Return the seconds that messages add if micro-batches return from the last rank.

        A message of another chunk than the last leaves beside DP.sync, or in the gap without it.
        In the gap it adds a dependent computation of the last rank, of ``seconds`` by stage. Of
        these computations ``free_s`` in all cost nothing.
        """
        number = self.microbatches * (len(self.own) - 1)
        each_s = min(seconds[s] for s in range(self.num_ranks - 1, self.num_stages, self.num_ranks))
        free = min(number, free_s / each_s) if each_s else number
        return min(self.send_s * (number - free), max(0.0, number * each_s - free_s))
