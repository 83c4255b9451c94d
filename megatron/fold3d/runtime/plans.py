"""The plan of an iteration, made once for each number of micro-batches.

That number changes within a run: batch size ramp-up changes it between iterations, and
evaluation may have its own.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.fold3d.config.fold3d_config import Fold3DConfig
from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.compile import forward_only, lower, order_of
from megatron.fold3d.plan.ir import Op, Plan, PlanError
from megatron.fold3d.plan.ops import COPY_OPS, SYNC_OPS, UPDATE_OPS
from megatron.fold3d.plan.verify import verify

if TYPE_CHECKING:
    from megatron.fold3d.plan.passes.offload import OffloadChoice
    from megatron.fold3d.policy.predicted import Predicted


class Plans:
    """Verified plans of one configuration, cached once they are made.

    Attributes:
        latest: the plan of the latest training iteration, with the offloads that this rank chose.
        fixes_offload: whether the user's plan has OFFLOAD actions of its own.
        carries: whether DP.sync may reach into the next iteration where the choice says so.
    """

    def __init__(self, config: Fold3DConfig) -> None:
        self.name = config.choice.order
        self.latest: Plan | None = None
        self.fixes_offload = False
        self.carries = True
        self._config = config
        self._made: dict[tuple[int, OffloadChoice | None, bool, bool], Plan] = {}
        self._chosen: dict[int, Predicted | None] = {}

    def choose(self, num_microbatches: int, chosen: "Predicted | None") -> None:
        """Set the choice for iterations of this size; None goes back to the configuration."""
        self._chosen[num_microbatches] = chosen
        self._made.clear()

    def chosen(self, num_microbatches: int) -> "Predicted | None":
        """Return what was chosen for iterations of this size, if anything was."""
        return self._chosen.get(num_microbatches)

    def shares(self, order: Plan) -> tuple[float, ...]:
        """Return, by stage, the part of DP.sync that starts in its iteration; empty is all."""
        if not self._choice(order).carries:
            return ()
        if (chosen := self.chosen(order.num_microbatches)) is not None:
            return chosen.shares
        share = self._config.choice.share
        if share is None:
            from megatron.fold3d.policy.backward_shares import FIRST_SHARE

            share = FIRST_SHARE  # until times are measured
        return (share,) * order.num_stages

    def order(self, num_microbatches: int) -> Plan:
        """Return the order of a training iteration: its computations only.

        Raises:
            PlanError: as `training`.
        """
        config = self._config
        if config.plan_file is not None:
            from megatron.fold3d.runtime.plan_from_file import read_order

            order = read_order(config, config.plan_file, num_microbatches)
            self.fixes_offload = order.has(*COPY_OPS)
            return order if self.carries else order.select(frozenset(Op) - SYNC_OPS - UPDATE_OPS)
        if (chosen := self.chosen(num_microbatches)) is not None:
            return chosen.order
        order = order_of(config.choice, config.num_ranks, num_microbatches)
        if not config.choice.fills_gaps:
            return order

        from megatron.fold3d.plan.passes.place_weight_grads import place_as_if_equal

        return place_as_if_equal(order, config.choice.held)  # until times are measured

    def training(self, num_microbatches: int, offloaded: "OffloadChoice | None" = None) -> Plan:
        """Return the plan of a training iteration.

        Args:
            num_microbatches: the number of the iteration.
            offloaded: which activations of each rank are offloaded; by default all.

        Raises:
            PlanError: no plan of this size can run, or the user's plan has another size.
        """
        self.latest = self._get(num_microbatches, offloaded)
        return self.latest

    def evaluation(self, num_microbatches: int) -> Plan:
        """Return a plan of forwards only.

        Its order is the interleaved one, for every training schedule. A group of p micro-batches
        passes all segments before the next group, so rank 0 buffers as few of the last rank's
        outputs as possible.
        """
        return self._get(num_microbatches, trains=False)

    def _get(
        self, size: int, offloaded: "OffloadChoice | None" = None, *, trains: bool = True
    ) -> Plan:
        key = size, offloaded, self.carries, trains
        if key not in self._made:
            try:
                plan = self._training(size, offloaded) if trains else self._evaluation(size)
                verify(plan)
            except PlanError as error:
                raise PlanError(f"{self.name}: {error}") from None
            self._made[key] = plan
        return self._made[key]

    def _choice(self, order: Plan) -> Choice:
        chosen = self.chosen(order.num_microbatches)
        choice = self._config.choice if chosen is None else chosen.choice
        return choice if self.carries else choice.in_iteration()

    def _training(self, num_microbatches: int, offloaded: "OffloadChoice | None") -> Plan:
        config, order = self._config, self.order(num_microbatches)
        if config.offload_activations != "off" and offloaded is None:
            from megatron.fold3d.plan.passes.offload import OffloadChoice

            offloaded = OffloadChoice()  # all
        shares = self.shares(order)
        return lower(
            order,
            self._choice(order),
            config.features,
            shares=shares,
            forwards_before_gather=self._forwards_before_gather(order, shares),
            offload=offloaded,
        )

    def _forwards_before_gather(self, order: Plan, shares: Sequence[float]) -> dict[int, int]:
        """Return how many forwards overlap what is left of a stage, before its all-gather."""
        config = self._config
        if not (shares and config.features.gathers_params) or config.plan_file is not None:
            return {}

        from megatron.fold3d.policy.backward_shares import forwards_before_gather

        size, m = config.parameter_share, order.num_microbatches
        return {s: forwards_before_gather(1 - share, size, m) for s, share in enumerate(shares)}

    def _evaluation(self, num_microbatches: int) -> Plan:
        choice = Choice.plain("interleaved", self._config.num_segments)
        order = forward_only(order_of(choice, self._config.num_ranks, num_microbatches))
        return lower(order, features=self._config.features.forwards)
