"""The plan of an iteration, made once for each number of micro-batches.

That number changes within a run: batch size ramp-up changes it between iterations, and
evaluation may have its own.
"""

import logging
from collections.abc import Callable

from megatron.fold3d.config import Fold3DConfig
from megatron.fold3d.plan.files import read_plan
from megatron.fold3d.plan.ir import Plan, PlanError
from megatron.fold3d.plan.lowering import add_p2p, defer_grad_sync, forward_only, lower
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.plan.verify import peak_activations, verify

logger = logging.getLogger(__name__)


class Plans:
    """Verified plans of one configuration, kept once they are made."""

    def __init__(self, config: Fold3DConfig) -> None:
        self._config = config
        self._made: dict[tuple[int, str], Plan] = {}

    def training(self, num_microbatches: int) -> Plan:
        """Return the plan of a training iteration.

        Raises:
            PlanError: no plan of this size can run, or the user's plan has another size.
        """
        return self._get(num_microbatches, self._make_training)

    def evaluation(self, num_microbatches: int) -> Plan:
        """Return a plan of forwards alone.

        Its order is the interleaved one, whatever trains: a group of p micro-batches passes all
        segments before the next, so that rank 0 buffers as few of the last rank's as possible.
        """
        return self._get(num_microbatches, self._make_evaluation)

    def _get(self, num_microbatches: int, make: Callable[[int], Plan]) -> Plan:
        key = num_microbatches, make.__name__
        if key not in self._made:
            plan = self._made[key] = make(num_microbatches)
            verify(plan)
            logger.info("%s", self._describe(plan))
        return self._made[key]

    def _make_training(self, num_microbatches: int) -> Plan:
        plan = lower(self._order(num_microbatches))
        return defer_grad_sync(plan, self._config.deferred_stages)

    def _order(self, num_microbatches: int) -> Plan:
        config = self._config
        if config.plan_file is None:
            return build(
                config.schedule,
                num_ranks=config.num_ranks,
                num_segments=config.num_segments,
                num_microbatches=num_microbatches,
                last_segment=config.aiao_last_segment,
                group_size=config.microbatch_group_size,
            )
        plan = read_plan(config.plan_file)
        found = plan.num_ranks, plan.num_segments, plan.num_microbatches
        if found != (config.num_ranks, config.num_segments, num_microbatches):
            raise PlanError(
                f"{config.plan_file} has {_sizes(*found)}, this iteration "
                f"{_sizes(config.num_ranks, config.num_segments, num_microbatches)}; "
                "a plan file fits one size: change the flags, or use --schedule"
            )
        return plan

    def _make_evaluation(self, num_microbatches: int) -> Plan:
        order = build(
            "interleaved",
            num_ranks=self._config.num_ranks,
            num_segments=self._config.num_segments,
            num_microbatches=num_microbatches,
        )
        forwards = forward_only(order)
        return add_p2p(forwards) if forwards.num_ranks > 1 else forwards

    def _describe(self, plan: Plan) -> str:
        peaks = ", ".join(map(str, peak_activations(plan)))
        sizes = _sizes(plan.num_ranks, plan.num_segments, plan.num_microbatches)
        return f"plan of {self._config.schedule}: {sizes}; activations held per rank: {peaks}"


def _sizes(num_ranks: int, num_segments: int, num_microbatches: int) -> str:
    return f"{num_ranks} ranks, {num_segments} segments, {num_microbatches} micro-batches"
