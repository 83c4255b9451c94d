"""The plan of an iteration, made once for each number of micro-batches.

That number changes within a run: batch size ramp-up changes it between iterations, and
evaluation may have its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from megatron.fold3d.config.fold3d_config import Fold3DConfig
from megatron.fold3d.plan.compile import Options, compile_plan, forward_only
from megatron.fold3d.plan.ir import Op, Plan, PlanError
from megatron.fold3d.plan.ops import COPY_OPS, SYNC_OPS, UPDATE_OPS
from megatron.fold3d.plan.schedules import build

if TYPE_CHECKING:
    from megatron.fold3d.plan.passes.offload import OffloadChoice
    from megatron.fold3d.policy.run_choice import RunChoice


Arrange = Callable[[Callable[[int | None], Plan]], Plan]
"""Takes a function from the number of forwards ahead to an order; returns the order that runs."""


class Plans:
    """Verified plans of one configuration, cached once they are made.

    Attributes:
        latest: the plan of the latest training iteration, with the offloads that this rank chose.
        fixes_offload: whether the user's plan has OFFLOAD actions of its own.
        carries: whether DP.sync may reach into the next iteration where the choice says so.
    """

    def __init__(self, config: Fold3DConfig) -> None:
        self.name = config.name
        self.latest: Plan | None = None
        self.fixes_offload = False
        self.carries = True
        self._config = config
        self._made: dict[tuple[int, str, OffloadChoice | None, bool], Plan] = {}
        self._arrange: Arrange | None = None
        self._choices: dict[int, RunChoice] = {}

    def arrange(self, arrange: "Arrange") -> None:
        """From now on let ``arrange`` make the orders of all plans."""
        self._arrange = arrange
        self._made.clear()

    def choose(self, num_microbatches: int, choice: "RunChoice | None") -> None:
        """Set the choice for iterations of this size; None goes back to the configuration."""
        self._choices.pop(num_microbatches, None)
        if choice is not None:
            self._choices[num_microbatches] = choice
        self._made.clear()

    def choice(self, num_microbatches: int) -> "RunChoice | None":
        """Return what was chosen for iterations of this size, if anything was."""
        return self._choices.get(num_microbatches)

    def shares(self, order: Plan) -> tuple[float, ...]:
        """Return, by stage, the part of DP.sync that starts in its iteration; empty is all."""
        if not self.carries:
            return ()
        if (choice := self.choice(order.num_microbatches)) is not None:
            return choice.shares or ()
        share = self._config.backward_share
        return () if share is None else (share,) * order.num_stages

    def order(self, num_microbatches: int) -> Plan:
        """Return the order of a training iteration: its computations only.

        Raises:
            PlanError: as `training`.
        """
        return self._training_order(num_microbatches)

    def training(self, num_microbatches: int, offloaded: "OffloadChoice | None" = None) -> Plan:
        """Return the plan of a training iteration.

        Args:
            num_microbatches: the number of the iteration.
            offloaded: which activations of each rank are offloaded; by default all.

        Raises:
            PlanError: no plan of this size can run, or the user's plan has another size.
        """
        self.latest = self._get(num_microbatches, self._training_order, offloaded)
        return self.latest

    def evaluation(self, num_microbatches: int) -> Plan:
        """Return a plan of forwards only.

        Its order is the interleaved one, for every training schedule. A group of p micro-batches
        passes all segments before the next group, so rank 0 buffers as few of the last rank's
        outputs as possible.
        """
        return self._get(num_microbatches, self._evaluation_order)

    def _get(
        self,
        num_microbatches: int,
        make: Callable[[int], Plan],
        offloaded: "OffloadChoice | None" = None,
    ) -> Plan:
        key = num_microbatches, make.__name__, offloaded, self.carries
        if key not in self._made:
            try:
                order = make(num_microbatches)
                plan = compile_plan(order, self._options(order, offloaded))
            except PlanError as error:
                raise PlanError(f"{self.name}: {error}") from None
            self._made[key] = plan
        return self._made[key]

    def _options(self, order: Plan, offloaded: "OffloadChoice | None") -> Options:
        """Return the passes' options for an order; one without backwards needs transfers only."""
        config = self._config
        if not order.has_backwards:
            return Options(receives_late=config.receives_late, receives_ahead=config.receives_ahead)
        if config.offload_activations != "off" and offloaded is None:
            from megatron.fold3d.plan.passes.offload import OffloadChoice

            offloaded = OffloadChoice()  # all
        choice = self.choice(order.num_microbatches)
        shares = self.shares(order)
        options = Options(
            delay_weight_grads=() if config.auto_weight_grads else config.delay_weight_grads,
            recompute_early=config.recompute_early,
            steps_shards=config.steps_shards,
            gathers_params=config.gathers_params,
            replicated_stages=config.replicated_stages,
            shards_params=config.shards_params,
            shards_grads=config.shards_grads,
            overlap_tensor_parallel=config.overlap_tensor_parallel,
            grad_sync="overlap" if config.overlap_grad_reduce else "serial",
            offload=offloaded,
            carried_stages=range(order.num_stages if shares else 0),
            shares=shares,
            forwards_before_gather=self._forwards_before_gather(order, shares),
            slices=config.slices_dp_sync,
            reduces_early=config.reduces_early,
            early_dp_sync=config.reduced_early,
            receives_late=config.receives_late,
            receives_ahead=config.receives_ahead,
        )
        if choice is None:
            return options
        return replace(
            options,
            delay_weight_grads=choice.delayed,
            replicated_stages=choice.replicated_stages,
            early_dp_sync=choice.reduced_early,
        )

    def _forwards_before_gather(self, order: Plan, shares: Sequence[float]) -> dict[int, int]:
        """Return how many forwards overlap what is left of a stage, before its all-gather."""
        config = self._config
        if not (shares and config.gathers_params) or config.plan_file is not None:
            return {}

        from megatron.fold3d.policy.backward_shares import forwards_before_gather

        size, m = config.parameter_share, order.num_microbatches
        return {s: forwards_before_gather(1 - share, size, m) for s, share in enumerate(shares)}

    def _training_order(self, num_microbatches: int) -> Plan:
        config = self._config
        if config.plan_file is not None:
            from megatron.fold3d.runtime.plan_from_file import read_order

            order = read_order(config, config.plan_file, num_microbatches)
            self.fixes_offload = order.has(*COPY_OPS)
            return order if self.carries else order.select(frozenset(Op) - SYNC_OPS - UPDATE_OPS)
        if (choice := self.choice(num_microbatches)) is not None:
            return choice.order
        schedule = config.schedule
        if schedule == "auto":  # until something is chosen
            from megatron.fold3d.policy.run_choice import stock_schedule

            schedule = stock_schedule(config.num_segments)
        make = partial(
            build,
            schedule,
            num_ranks=config.num_ranks,
            num_segments=config.num_segments,
            num_microbatches=num_microbatches,
            group_size=config.microbatch_group_size,
        )
        if config.overlap_tensor_parallel:
            from megatron.fold3d.plan.passes.pairs import in_pairs, num_pairs

            pairs = make(
                num_microbatches=num_pairs(num_microbatches), forwards_ahead=config.forwards_ahead
            )
            return in_pairs(pairs, num_microbatches)
        if self._arrange is not None:
            return self._arrange(lambda ahead: make(forwards_ahead=ahead))
        return make(forwards_ahead=config.forwards_ahead)

    def _evaluation_order(self, num_microbatches: int) -> Plan:
        order = build(
            "interleaved",
            num_ranks=self._config.num_ranks,
            num_segments=self._config.num_segments,
            num_microbatches=num_microbatches,
        )
        return forward_only(order)
