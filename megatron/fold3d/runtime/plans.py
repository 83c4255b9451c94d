"""The plan of an iteration, made once for each number of micro-batches.

That number changes within a run: batch size ramp-up changes it between iterations, and
evaluation may have its own.
"""

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.fold3d.config.fold3d_config import Fold3DConfig
from megatron.fold3d.plan.compile import Options, compile_plan, forward_only
from megatron.fold3d.plan.ir import Op, Plan, PlanError
from megatron.fold3d.plan.passes.grad_sync import deferred_stages
from megatron.fold3d.plan.schedules import build

if TYPE_CHECKING:
    from megatron.fold3d.plan.passes.offload import OffloadChoice


class Plans:
    """Verified plans of one configuration, cached once they are made.

    Attributes:
        latest: the plan of the latest training iteration, with the offloads that this rank chose.
        fixes_offload: whether the user's plan has OFFLOAD actions of its own.
    """

    def __init__(self, config: Fold3DConfig) -> None:
        self.name = str(config.plan_file or config.schedule)
        self.latest: Plan | None = None
        self.fixes_offload = False
        self._config = config
        self._made: dict[tuple[int, str, OffloadChoice | None], Plan] = {}

    def training(self, num_microbatches: int, offloaded: "OffloadChoice | None" = None) -> Plan:
        """Return the plan of a training iteration.

        Args:
            num_microbatches: of the iteration.
            offloaded: which activations of each rank are offloaded; by default all.

        Raises:
            PlanError: no plan of this size can run, or the user's plan has another size.
        """
        self.latest = self._get(num_microbatches, self._training_order, offloaded)
        return self.latest

    def evaluation(self, num_microbatches: int) -> Plan:
        """Return a plan of forwards only.

        Its order is the interleaved one, whatever schedule trains. A group of p micro-batches
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
        key = num_microbatches, make.__name__, offloaded
        if key not in self._made:
            try:
                order = make(num_microbatches)
                plan = compile_plan(order, self._options(order, offloaded))
            except PlanError as error:
                raise PlanError(f"{self.name}: {error}") from None
            self._made[key] = plan
        return self._made[key]

    def _options(self, order: Plan, offloaded: "OffloadChoice | None") -> Options:
        """Return the passes' options for an order; an order without backwards has none."""
        config = self._config
        if not order.has(Op.BACKWARD):
            return Options()
        if config.offload_activations != "off" and offloaded is None:
            from megatron.fold3d.plan.passes.offload import OffloadChoice

            offloaded = OffloadChoice()  # all
        return Options(
            delay_weight_grads=config.delay_weight_grads,
            recompute_early=config.recompute_early,
            gathers_params=config.gathers_params,
            offload=offloaded,
            deferred_stages=config.deferred_stages,
        )

    def _training_order(self, num_microbatches: int) -> Plan:
        config = self._config
        if config.plan_file is not None:
            return self._read(config.plan_file, num_microbatches)
        return build(
            config.schedule,
            num_ranks=config.num_ranks,
            num_segments=config.num_segments,
            num_microbatches=num_microbatches,
            last_segment=config.aiao_last_segment,
            group_size=config.microbatch_group_size,
            forwards_ahead=config.forwards_ahead,
        )

    def _read(self, path: Path, num_microbatches: int) -> Plan:
        from megatron.fold3d.plan.files import parse_plan

        plan = parse_plan(path.read_bytes())
        found = plan.num_ranks, plan.num_segments, plan.num_microbatches
        needed = self._config.num_ranks, self._config.num_segments, num_microbatches
        if found != needed:
            raise PlanError(
                f"found {_sizes(*found)}, this run has {_sizes(*needed)}; "
                "a plan file fits one size: change the flags, or use --schedule"
            )
        if plan.has(Op.WEIGHT) and not self._config.delay_weight_grads:
            raise PlanError("found W in the plan; give --delay-weight-grads with its segments")
        if plan.has(Op.RECOMPUTE) and not self._config.recompute_early:
            raise PlanError("found R in the plan; give --recompute-early with its stages")
        if plan.has(Op.OFFLOAD):
            if self._config.offload_activations == "off":
                raise PlanError("found OFFLOAD in the plan; give --offload-activations on")
            self.fixes_offload = True
        for stage in chain.from_iterable(map(deferred_stages, plan.programs)):
            if stage not in self._config.deferred_stages:
                raise PlanError(
                    f"found {stage}WAIT_GRAD before {stage}F0, which ends DP.sync of the iteration "
                    "before: give --backward-share, or move the action to the end"
                )
        return plan

    def _evaluation_order(self, num_microbatches: int) -> Plan:
        order = build(
            "interleaved",
            num_ranks=self._config.num_ranks,
            num_segments=self._config.num_segments,
            num_microbatches=num_microbatches,
        )
        return forward_only(order)


def _sizes(num_ranks: int, num_segments: int, num_microbatches: int) -> str:
    return f"{num_ranks} ranks, {num_segments} segments, {num_microbatches} micro-batches"
