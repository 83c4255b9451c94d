"""The recipe: from a job to the plan that runs.

Executor, simulator, planner and commands all call `lower` with a `Job`, so the simulated plan is
the plan that runs. Only the passes that a job needs are imported. Passes run in this order:

order ──> delay_weight_grads ──> recompute_early ──> add_param_gather or shard_params
──> add_offload ──> add_p2p ──> pair_microbatches ──> DP.sync ──> carry_grad_sync ──> gather_later
──> reduce_early and share_grad_sync, or slice_grad_sync ──> shard_grads ──> plan
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal, Self

from megatron.fold3d.plan.choice import Choice, Segment
from megatron.fold3d.plan.ir import Op, Plan
from megatron.fold3d.plan.ops import P2P_OPS, SUM_OPS, SYNC_OPS, UPDATE_OPS, WEIGHT_OPS
from megatron.fold3d.plan.passes.grad_sync import (
    add_grad_sync,
    aligned_grad_sync,
    serial_grad_sync,
)
from megatron.fold3d.plan.passes.transfers import add_p2p
from megatron.fold3d.plan.schedules import build

if TYPE_CHECKING:
    from megatron.fold3d.plan.passes.offload import OffloadChoice

GradSync = Literal["overlap", "serial", "aligned"]
Shards = Literal["off", "weights", "gradients"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that decides the plan of a run's iterations.

    A job is made from a run's flags, or from a candidate of a search. A search changes the job's
    choice, and a measurement changes its shares.

    Attributes:
        num_microbatches: micro-batches of an iteration; 0 while it is not known.
        order: an order instead of the choice's: the plan of a file, or an order whose weight
            gradients fill gaps. All actions that it has besides computations stay.
        steps_shards: whether the optimizer is distributed: each replica steps a shard of a stage.
        gathers_params: whether actions of the plan gather parameters that are stepped in shards.
        shards: which tensors a replica keeps only in shards: parameters of a stage that does not
            compute, and with ``gradients`` also reduced gradients.
        grad_sync: whether DP.sync starts after each stage's last backward, after all backwards, or
            where stock Megatron starts it.
        reduces_early: whether DP.sync may start between weight gradients.
        receives_late: whether receives are posted late enough to block nothing in a shared queue.
        receives_ahead: how many computations ahead receives are posted, unless ``receives_late``.
        shares: by stage, the part of a carried sum that starts in its iteration; empty is all.
        parameter_share: bytes of a parameter, divided by the bytes of its gradient.
        offload: which saved activations go to host memory, and how early they return.
        combined: whether stock runs forwards as one with backwards, to hide experts' all-to-alls.
    """

    choice: Choice
    num_ranks: int
    num_microbatches: int = 0
    order: Plan | None = None
    steps_shards: bool = False
    gathers_params: bool = False
    shards: Shards = "off"
    grad_sync: GradSync = "overlap"
    reduces_early: bool = False
    receives_late: bool = False
    receives_ahead: int = 1
    shares: tuple[float, ...] = ()
    parameter_share: float = 1.0
    offload: "OffloadChoice | None" = None
    combined: bool = False

    @classmethod
    def of(cls, order: Plan, choice: Choice | None = None, **fields: Any) -> Self:
        """Return the job of an order; by default all segments have default values."""
        return cls(
            choice=choice or Choice.plain("plan", order.num_segments),
            num_ranks=order.num_ranks,
            num_microbatches=order.num_microbatches,
            order=order,
            **fields,
        )

    @property
    def computed(self) -> Plan:
        """The order of computation.

        If weight gradients are to fill gaps and `order` is None, backwards still compute them,
        since `place_weight_grads` needs times.

        Raises:
            PlanError: the schedule has no order of these sizes.
        """
        if self.order is not None:
            return self.order
        named = replace(self.choice, segments=(Segment(),) * len(self.choice.segments))
        return _order(named, self.num_ranks, self.num_microbatches, self.combined)

    @property
    def in_iteration(self) -> Self:
        """The job with all DP.sync and steps inside their iteration."""
        order = self.order
        if order is not None:
            order = order.select(frozenset(Op) - SYNC_OPS - UPDATE_OPS)
        return replace(self, choice=self.choice.in_iteration(), order=order, shares=())

    @property
    def forwards(self) -> "Job":
        """The forwards alone, which evaluation runs.

        Evaluation runs forwards in the interleaved order under every schedule, since some forwards
        draw random numbers in evaluation too. A group of p micro-batches, or of the flags' size,
        passes all segments before the next group, so rank 0 buffers few of the last rank's outputs.
        """
        segments = len(self.choice.segments)
        plain = Choice.plain("interleaved", segments, group=self.choice.group)
        return Job.of(
            forward_only(replace(self, choice=plain, order=None, combined=False).computed),
            receives_late=self.receives_late,
            receives_ahead=self.receives_ahead,
        )


@lru_cache(maxsize=64)
def _order(choice: Choice, num_ranks: int, num_microbatches: int, combined: bool) -> Plan:
    def built(count: int, group: int | None = choice.group) -> Plan:
        return build(
            choice.schedule,
            num_ranks=num_ranks,
            num_segments=len(choice.segments),
            num_microbatches=count,
            group_size=group,
            forwards_ahead=choice.ahead,
        )

    if choice.pairs:
        from megatron.fold3d.plan.passes.pairs import in_pairs, num_pairs

        group = choice.group and num_pairs(choice.group)
        return in_pairs(built(num_pairs(num_microbatches), group), num_microbatches)
    if combined:
        from megatron.fold3d.plan.passes.combined import one_more_ahead

        return one_more_ahead(built(num_microbatches))
    return built(num_microbatches)


def lower(job: Job, *, transfers: bool = True) -> Plan:
    """Return the plan that runs: the order with the actions that the passes add.

    Args:
        transfers: False adds no transfers: the simulator sends a result when its computation ends.

    Raises:
        PlanError: the order cannot run, or the choice does not fit it.
    """
    choice, ranks, order = job.choice, job.num_ranks, job.computed
    if job.grad_sync == "serial" and order.has(*SUM_OPS):  # Megatron sums after all backwards
        order = order.select(frozenset(Op) - SUM_OPS - UPDATE_OPS)
    plan, has_weights = order, order.has(*WEIGHT_OPS)
    behind = choice.where(wgrad="behind")
    apart = tuple(sorted((*behind, *choice.where(wgrad="last"))))
    if apart and not has_weights:
        from megatron.fold3d.plan.passes.weight_grads import delay_weight_grads

        plan = delay_weight_grads(plan, apart, behind)
    early_stages = choice.stages(ranks, recompute="early")
    if early_stages and not plan.has(Op.RECOMPUTE):
        from megatron.fold3d.plan.passes.recompute import recompute_early

        plan = recompute_early(plan, early_stages, in_pairs=bool(choice.pairs))
    replicated = choice.stages(ranks, optimizer="replicated")
    if job.shards != "off":
        from megatron.fold3d.plan.passes.shard_params import shard_params

        plan = shard_params(plan)
    elif job.gathers_params:
        from megatron.fold3d.plan.passes.param_gather import add_param_gather

        plan = add_param_gather(plan, replicated)
    if job.offload is not None and not plan.has(Op.OFFLOAD):
        from megatron.fold3d.plan.passes.offload import add_offload

        plan = add_offload(plan, depth=job.offload.depth, at_most=job.offload.at_most)
    if transfers and ranks > 1 and not plan.has(*P2P_OPS):
        plan = add_p2p(
            plan,
            receives_late=job.receives_late,
            receives_ahead=job.receives_ahead,
            in_pairs=bool(choice.pairs),
        )
    if choice.pairs and (transfers or ranks == 1):
        from megatron.fold3d.plan.passes.pairs import pair_microbatches

        plan = pair_microbatches(plan)
    has_sums = plan.has(*SUM_OPS)
    is_cut = has_sums and any(
        op in SUM_OPS and end for program in plan.programs for _, op, end in program
    )
    if not has_sums:
        plan = _with_grad_sync(plan, replicated, job)
    carried = choice.stages(ranks, step="next")
    if carried:
        from megatron.fold3d.plan.passes.carried_grad_sync import carry_grad_sync

        plan = carry_grad_sync(plan, carried)
    if job.shares and plan.has(Op.ALL_GATHER) and not order.has(Op.ALL_GATHER):
        from megatron.fold3d.plan.passes.gather_later import gather_later

        plan = gather_later(plan, job.shares, job.parameter_share)
    if choice.slices and not is_cut:
        from megatron.fold3d.plan.passes.sliced_grad_sync import slice_grad_sync

        plan = slice_grad_sync(plan, job.shares or (1.0,) * plan.num_stages)
    elif not is_cut:
        if job.reduces_early and plan.has(Op.WEIGHT):
            from megatron.fold3d.plan.passes.early_grad_sync import reduce_early

            is_sharded = job.steps_shards or job.gathers_params or job.shards != "off"
            early = {*choice.stages(ranks, wgrad="behind"), *_reduced_last(plan, carried, job)}
            if has_weights:  # the order itself places weight gradients
                whole = replicated if is_sharded else range(plan.num_stages)
                early |= {stage for stage in whole if stage not in carried}
            plan = reduce_early(plan, early)
        if job.shares:
            from megatron.fold3d.plan.passes.carried_grad_sync import share_grad_sync

            plan = share_grad_sync(plan, job.shares)
    if job.shards == "gradients":
        from megatron.fold3d.plan.passes.shard_grads import shard_grads

        plan = shard_grads(plan)
    return plan


def _reduced_last(plan: Plan, carried: Sequence[int], job: Job) -> Iterator[int]:
    """Yield the stages whose weight gradients a rank computes after all of its backwards.

    Little else can overlap DP.sync of these stages, an all-reduce or a reduction to shards, unless
    it is carried.
    """
    for program in () if job.shards != "off" else plan.programs:
        behind = takewhile(lambda action: action.op is not Op.BACKWARD, reversed(program))
        stages = {stage for stage, op, _ in behind if op in WEIGHT_OPS}
        yield from (stage for stage in stages if stage not in carried)


def _with_grad_sync(plan: Plan, replicated: Sequence[int], job: Job) -> Plan:
    in_shards = {a.stage for program in plan.programs for a in program if a.op is Op.ALL_GATHER}
    if job.steps_shards and not in_shards:
        in_shards = {s for s in range(plan.num_stages) if s not in replicated}
    if job.grad_sync == "overlap":
        return add_grad_sync(plan, in_shards)
    add = serial_grad_sync if job.grad_sync == "serial" else aligned_grad_sync
    return add(plan, in_shards)


def forward_only(plan: Plan) -> Plan:
    """Return the forwards of a plan, which evaluation runs."""
    return plan.select({Op.FORWARD})
