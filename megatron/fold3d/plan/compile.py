"""The recipe: from a choice to the plan that runs.

Executor, simulator, planner and commands all call `order_of` and `lower`, so that the plan that is
simulated is the plan that runs. Only the passes that a choice needs are imported. They run in this
order:

order ──> delay_weight_grads ──> recompute_early ──> add_param_gather or shard_params
──> add_offload ──> add_p2p ──> pair_microbatches ──> DP.sync ──> carry_grad_sync ──> gather_later
──> reduce_early and share_grad_sync, or slice_grad_sync ──> shard_grads ──> plan
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Literal

from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.ir import Op, Plan
from megatron.fold3d.plan.ops import P2P_OPS, SUM_OPS, WEIGHT_OPS
from megatron.fold3d.plan.passes.grad_sync import add_grad_sync
from megatron.fold3d.plan.passes.transfers import add_p2p
from megatron.fold3d.plan.passes.weight_grads import delay_weight_grads
from megatron.fold3d.plan.schedules import build

if TYPE_CHECKING:
    from megatron.fold3d.plan.passes.offload import OffloadChoice

GradSync = Literal["overlap", "serial", "aligned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What a run has beside its choice: its optimizer, its DP.sync and its transfers.

    Attributes:
        steps_shards: whether the optimizer is distributed: each replica steps a shard of a stage.
        gathers_params: whether actions of the plan gather parameters that are stepped in shards.
        shards_params: whether a stage's parameters are whole only while it computes; actions gather
            them then.
        shards_grads: whether a replica keeps its shard alone of a stage's gradients, once reduced.
        grad_sync: whether DP.sync starts behind each stage's last backward, behind all backwards,
            or as stock Megatron starts it.
        reduces_early: whether DP.sync may start between weight gradients.
        transfers: False leaves them out: the simulator sends a result when its computation ends.
        receives_late: whether receives are posted where they hold up nothing in a shared queue.
        receives_ahead: how many computations ahead receives are posted that are not late.
    """

    steps_shards: bool = False
    gathers_params: bool = False
    shards_params: bool = False
    shards_grads: bool = False
    grad_sync: GradSync = "overlap"
    reduces_early: bool = False
    transfers: bool = True
    receives_late: bool = False
    receives_ahead: int = 1

    @property
    def forwards(self) -> "Features":
        """Those of a plan of forwards alone: its transfers."""
        return Features(receives_late=self.receives_late, receives_ahead=self.receives_ahead)


PLAIN = Features()


def order_of(choice: Choice, num_ranks: int, num_microbatches: int) -> Plan:
    """Return the order of computation of a choice that names a schedule.

    Where weight gradients fill gaps, they are still in their backwards: `place_weight_grads` needs
    times to place them.

    Raises:
        PlanError: there is no such order.
    """

    def built(count: int) -> Plan:
        return build(
            choice.schedule,
            num_ranks=num_ranks,
            num_segments=len(choice.segments),
            num_microbatches=count,
            group_size=choice.group,
            forwards_ahead=choice.ahead,
        )

    if not choice.pairs:
        return built(num_microbatches)

    from megatron.fold3d.plan.passes.pairs import in_pairs, num_pairs

    return in_pairs(built(num_pairs(num_microbatches)), num_microbatches)


def lower(
    order: Plan,
    choice: Choice | None = None,
    features: Features = PLAIN,
    *,
    shares: Sequence[float] = (),
    forwards_before_gather: Mapping[int, int] | None = None,
    offload: "OffloadChoice | None" = None,
) -> Plan:
    """Return the plan that runs: the order with the actions that the passes add.

    Args:
        order: the order of computation. What it has of the other actions, from a plan file for
            example, it keeps.
        choice: what its segments do; by default all have the default values.
        features: what the run has beside.
        shares: by stage, the part of a carried sum that starts in its iteration; empty is all.
        forwards_before_gather: by carried stage, how many forwards of the rank's stage before
            precede its all-gather.
        offload: which saved activations are offloaded to host memory, and how early they return.

    Raises:
        PlanError: the order cannot run, or the choice does not fit it.
    """
    choice = choice or Choice.plain("plan", order.num_segments)
    ranks = order.num_ranks
    plan, has_weights = order, order.has(*WEIGHT_OPS)
    behind = choice.where(wgrad="behind")
    if apart := tuple(sorted((*behind, *choice.where(wgrad="last")))):
        plan = plan if has_weights else delay_weight_grads(plan, apart, behind)
    early_stages = choice.stages(ranks, recompute="early")
    if early_stages and not plan.has(Op.RECOMPUTE):
        from megatron.fold3d.plan.passes.recompute import recompute_early

        plan = recompute_early(plan, early_stages, in_pairs=bool(choice.pairs))
    replicated = choice.stages(ranks, optimizer="replicated")
    if features.shards_params:
        from megatron.fold3d.plan.passes.shard_params import shard_params

        plan = shard_params(plan)
    elif features.gathers_params:
        from megatron.fold3d.plan.passes.param_gather import add_param_gather

        plan = add_param_gather(plan, replicated)
    if offload is not None and not plan.has(Op.OFFLOAD):
        from megatron.fold3d.plan.passes.offload import add_offload

        plan = add_offload(plan, depth=offload.depth, at_most=offload.at_most)
    if features.transfers and plan.num_ranks > 1 and not plan.has(*P2P_OPS):
        plan = add_p2p(
            plan,
            receives_late=features.receives_late,
            receives_ahead=features.receives_ahead,
        )
    if choice.pairs:
        from megatron.fold3d.plan.passes.pairs import pair_microbatches

        plan = pair_microbatches(plan)
    has_sums = plan.has(*SUM_OPS)
    is_cut = has_sums and any(
        op in SUM_OPS and end for program in plan.programs for _, op, end in program
    )
    if not has_sums:
        plan = _with_grad_sync(plan, replicated, features)
    carried = choice.stages(ranks, step="next")
    if carried:
        from megatron.fold3d.plan.passes.carried_grad_sync import carry_grad_sync

        plan = carry_grad_sync(plan, carried)
    if forwards_before_gather:
        from megatron.fold3d.plan.passes.gather_later import gather_later

        plan = gather_later(plan, forwards_before_gather)
    if choice.slices and not is_cut:
        from megatron.fold3d.plan.passes.sliced_grad_sync import slice_grad_sync

        plan = slice_grad_sync(plan, shares or (1.0,) * plan.num_stages)
    elif not is_cut:
        if features.reduces_early and plan.has(Op.WEIGHT):
            from megatron.fold3d.plan.passes.early_grad_sync import reduce_early

            is_sharded = features.steps_shards or features.gathers_params or features.shards_params
            early = {*choice.stages(ranks, wgrad="behind"), *_reduced_last(plan, carried, features)}
            if has_weights:  # where its weight gradients are, the order says
                whole = replicated if is_sharded else range(plan.num_stages)
                early |= {stage for stage in whole if stage not in carried}
            plan = reduce_early(plan, early)
        if shares:
            from megatron.fold3d.plan.passes.carried_grad_sync import share_grad_sync

            plan = share_grad_sync(plan, shares)
    if features.shards_grads:
        from megatron.fold3d.plan.passes.shard_grads import shard_grads

        plan = shard_grads(plan)
    return plan


def _reduced_last(plan: Plan, carried: Sequence[int], features: Features) -> Iterator[int]:
    """Yield the stages that a rank computes weight gradients of behind all of its backwards.

    Little else overlaps their DP.sync, be it an all-reduce or to shards, unless it is carried.
    """
    for program in () if features.shards_params else plan.programs:
        behind = takewhile(lambda action: action.op is not Op.BACKWARD, reversed(program))
        stages = {stage for stage, op, _ in behind if op in WEIGHT_OPS}
        yield from (stage for stage in stages if stage not in carried)


def _with_grad_sync(plan: Plan, replicated: Sequence[int], features: Features) -> Plan:
    in_shards = {a.stage for program in plan.programs for a in program if a.op is Op.ALL_GATHER}
    if features.steps_shards and not in_shards:
        in_shards = {s for s in range(plan.num_stages) if s not in replicated}
    if features.grad_sync == "overlap":
        return add_grad_sync(plan, in_shards)

    from megatron.fold3d.plan.passes import stock_grad_sync

    if features.grad_sync == "serial":
        return stock_grad_sync.serial_grad_sync(plan, in_shards)
    return stock_grad_sync.aligned_grad_sync(plan, in_shards)


def forward_only(plan: Plan) -> Plan:
    """Return the forwards of a plan, which evaluation runs."""
    return plan.select({Op.FORWARD})
