"""The recipe: from an order of computation and options to the plan that runs.

Executor, simulator, planner and commands all call `lower`, so that the plan that is simulated is
the plan that runs. Only the passes that the options need are imported. They run in this order:

order ──> delay_weight_grads ──> recompute_early ──> add_param_gather or shard_params
──> add_offload ──> add_p2p ──> pair_microbatches ──> DP.sync ──> carry_grad_sync ──> gather_later
──> reduce_early and share_grad_sync, or slice_grad_sync ──> shard_grads ──> plan
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Literal

from megatron.fold3d.plan.ir import Op, Plan
from megatron.fold3d.plan.ops import SUM_OPS, WEIGHT_OPS
from megatron.fold3d.plan.passes.grad_sync import add_grad_sync
from megatron.fold3d.plan.passes.recompute import recompute_early
from megatron.fold3d.plan.passes.transfers import add_p2p
from megatron.fold3d.plan.passes.weight_grads import delay_weight_grads
from megatron.fold3d.plan.verify import verify

if TYPE_CHECKING:
    from megatron.fold3d.plan.passes.offload import OffloadChoice

GradSync = Literal["overlap", "serial", "aligned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of the passes.

    If an order already has the actions of a pass, from a plan file for example, it keeps them.
    """

    delay_weight_grads: tuple[int, ...] = ()
    """Segments whose weight gradients are computed after all backwards of a rank.

    Those of `early_segments` are computed after the backwards of the segment.
    """
    recompute_early: Container[int] = ()
    """Stages that recompute before their gradients arrive."""
    steps_shards: bool = False
    """True if the optimizer is distributed: each replica steps a shard of a stage."""
    gathers_params: bool = False
    """True if parameters that are stepped in shards are gathered by actions of the plan."""
    replicated_stages: Container[int] = ()
    """Stages that every replica updates in full, although the optimizer is distributed."""
    shards_params: bool = False
    """True if a stage's parameters are whole only while it computes; actions gather them then."""
    shards_grads: bool = False
    """True if each replica keeps only its shard of a stage's gradients once they are reduced."""
    offload: "OffloadChoice | None" = None
    """Which saved activations are offloaded to host memory, and how early they are reloaded."""
    overlap_tensor_parallel: bool = False
    """Whether neighbouring micro-batches are computed in pairs: see `in_pairs`."""
    transfers: bool = True
    """False leaves out the transfers: the simulator sends a result when its computation ends."""
    grad_sync: GradSync = "overlap"
    """Where DP.sync starts: behind each stage's last backward, or as stock Megatron starts it."""
    carried_stages: Container[int] = ()
    """Stages whose DP.sync may reach into the next iteration (paper Algorithm 2)."""
    shares: tuple[float, ...] = ()
    """By stage, the part of a carried DP.sync that starts in its iteration; empty is all."""
    forwards_before_gather: Mapping[int, int] = field(default_factory=dict)
    """By carried stage, how many forwards of the rank's stage before precede its all-gather."""
    slices: bool = False
    """Whether DP.sync is cut into slices, each of which overlaps a computation."""
    reduces_early: bool = False
    """Whether DP.sync may start between delayed weight gradients."""
    early_dp_sync: Container[int] = ()
    """The stages whose DP.sync may start there although it is carried, or reduces to shards.

    Each rank's last one with weight gradients need not be named if it is not carried.
    """
    receives_late: bool = False
    """Whether receives are posted late, so that they block nothing in a shared hardware queue."""
    receives_ahead: int = 1
    """How many computations ahead receives are posted that are not late."""

    def may_reduce_early(self, stage: int) -> bool:
        """Tell whether DP.sync of a stage may start between its weight gradients."""
        sharded = self.steps_shards or self.gathers_params or self.shards_params
        is_whole = not sharded or stage in self.replicated_stages
        may = (is_whole and stage not in self.carried_stages) or stage in self.early_dp_sync
        return self.reduces_early and may

    def reduced_last(self, plan: Plan) -> Iterator[int]:
        """Yield the stages that a rank computes weight gradients of behind all of its backwards.

        Little else overlaps their DP.sync, be it an all-reduce or to shards, unless it is carried.
        """
        if self.shards_params:
            return
        for program in plan.programs:
            behind = takewhile(lambda action: action.op is not Op.BACKWARD, reversed(program))
            stages = {stage for stage, op, _ in behind if op in WEIGHT_OPS}
            yield from (stage for stage in stages if stage not in self.carried_stages)

    def early_segments(self, num_ranks: int) -> tuple[int, ...]:
        """Return the delayed segments whose DP.sync starts between their weight gradients."""
        return tuple(
            segment
            for segment in self.delay_weight_grads
            if all(self.may_reduce_early(segment * num_ranks + rank) for rank in range(num_ranks))
        )


def compile_plan(order: Plan, options: Options) -> Plan:
    """Return the plan that runs, verified.

    Raises:
        PlanError: the order cannot run, or an option does not fit it.
    """
    plan = lower(order, options)
    verify(plan)
    return plan


def lower(order: Plan, options: Options | None = None) -> Plan:
    """Return the plan that runs: the order with the actions that the passes add.

    Args:
        order: the order of computation, with or without any of the other actions.
        options: the default adds transfers, and DP.sync behind each stage's last backward.

    Raises:
        PlanError: the order cannot run, or an option does not fit it.
    """
    options = options or Options()
    plan = order
    if options.delay_weight_grads and not plan.has(*WEIGHT_OPS):
        plan = delay_weight_grads(
            plan, options.delay_weight_grads, options.early_segments(plan.num_ranks)
        )
    in_pairs = options.overlap_tensor_parallel
    plan = recompute_early(plan, options.recompute_early, in_pairs=in_pairs)
    if options.shards_params:
        from megatron.fold3d.plan.passes.shard_params import shard_params

        plan = shard_params(plan)
    elif options.gathers_params:
        from megatron.fold3d.plan.passes.param_gather import add_param_gather

        plan = add_param_gather(plan, options.replicated_stages)
    if options.offload is not None and not plan.has(Op.OFFLOAD):
        from megatron.fold3d.plan.passes.offload import add_offload

        plan = add_offload(plan, depth=options.offload.depth, at_most=options.offload.at_most)
    if options.transfers and plan.num_ranks > 1 and not plan.has_p2p:
        plan = add_p2p(
            plan,
            receives_late=options.receives_late,
            receives_ahead=options.receives_ahead,
        )
    if options.overlap_tensor_parallel:
        from megatron.fold3d.plan.passes.pairs import pair_microbatches

        plan = pair_microbatches(plan)
    has_sums = plan.has(*SUM_OPS)
    is_cut = has_sums and any(
        op in SUM_OPS and end for program in plan.programs for _, op, end in program
    )
    if not has_sums:
        plan = _with_grad_sync(plan, options)
    if any(stage in options.carried_stages for stage in range(plan.num_stages)):
        from megatron.fold3d.plan.passes.carried_grad_sync import carry_grad_sync

        plan = carry_grad_sync(plan, options.carried_stages)
    if options.forwards_before_gather:
        from megatron.fold3d.plan.passes.gather_later import gather_later

        plan = gather_later(plan, options.forwards_before_gather)
    shares = options.shares or (1.0,) * plan.num_stages
    if options.slices and not is_cut:
        from megatron.fold3d.plan.passes.sliced_grad_sync import slice_grad_sync

        plan = slice_grad_sync(plan, shares)
    elif not is_cut:
        if options.reduces_early and plan.has(Op.WEIGHT):
            from megatron.fold3d.plan.passes.early_grad_sync import reduce_early

            early = filter(options.may_reduce_early, range(plan.num_stages))
            plan = reduce_early(plan, {*early, *options.reduced_last(plan)})
        if options.shares:
            from megatron.fold3d.plan.passes.carried_grad_sync import share_grad_sync

            plan = share_grad_sync(plan, shares)
    if options.shards_grads:
        from megatron.fold3d.plan.passes.shard_grads import shard_grads

        plan = shard_grads(plan)
    return plan


def _with_grad_sync(plan: Plan, options: Options) -> Plan:
    in_shards = {a.stage for program in plan.programs for a in program if a.op is Op.ALL_GATHER}
    if options.steps_shards and not in_shards:
        in_shards = {s for s in range(plan.num_stages) if s not in options.replicated_stages}
    if options.grad_sync == "overlap":
        return add_grad_sync(plan, in_shards)

    from megatron.fold3d.plan.passes import stock_grad_sync

    if options.grad_sync == "serial":
        return stock_grad_sync.serial_grad_sync(plan, in_shards)
    return stock_grad_sync.aligned_grad_sync(plan, in_shards)


def forward_only(plan: Plan) -> Plan:
    """Return the forwards of a plan, which evaluation runs."""
    return plan.select({Op.FORWARD})
