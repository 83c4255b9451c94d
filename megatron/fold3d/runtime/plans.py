"""The jobs of a configuration, one for each number of micro-batches, and their verified plans.

The number of micro-batches changes within a run: batch size ramp-up changes it between iterations,
and evaluation may have another.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from megatron.fold3d.config.fold3d_config import Fold3DConfig
from megatron.fold3d.plan.compile import Job, lower
from megatron.fold3d.plan.ir import Op, Plan, PlanError
from megatron.fold3d.plan.verify import verify


class Plans:
    """Jobs of one configuration and their plans, each made once."""

    def __init__(self, config: Fold3DConfig) -> None:
        self.name = config.choice.order
        self._config = config
        self._jobs: dict[int, Job] = {}
        self._plans: dict[Job, Plan] = {}

    def job(self, num_microbatches: int) -> Job:
        """Return the job of training iterations as long as nothing is measured or chosen.

        Raises:
            PlanError: the user's plan has another size, or actions of a feature that is off.
        """
        if num_microbatches not in self._jobs:
            with self._named():
                self._jobs[num_microbatches] = self._made(num_microbatches)
        return self._jobs[num_microbatches]

    def training(self, job: Job) -> Plan:
        """Return the plan of a job.

        Raises:
            PlanError: it cannot run.
        """
        if job not in self._plans:
            with self._named():
                plan = lower(job)
                verify(plan)
                if self._config.has_engine_modules and plan.has(Op.WEIGHT):
                    from megatron.fold3d.plan.weight_order import check_oldest_first

                    check_oldest_first(plan)
            self._plans[job] = plan
        return self._plans[job]

    def evaluation(self, num_microbatches: int) -> Plan:
        """Return a plan of forwards only; its order is the same for every training schedule."""
        return self.training(replace(self._config.job, num_microbatches=num_microbatches).forwards)

    def checked(self, num_microbatches: int) -> Plan | None:
        """Return the plan of an iteration; None for stock Megatron's schedule.

        Raises:
            PlanError: the plan cannot run, or a model with these layers cannot run it.
        """
        if self.name == "stock":
            return None
        job = self.job(num_microbatches)
        if job.choice.carries and self._config.clips_or_scales:  # some iterations carry nothing
            self._check_order(self.training(job.in_iteration))
        plan = self.training(job)
        self._check_order(plan)
        return plan

    def _check_order(self, plan: Plan) -> None:
        config = self._config
        if config.choice.pairs:
            from megatron.fold3d.plan.passes.pairs import check_pairs

            check_pairs(plan)
        if config.recomputes_means:
            from megatron.fold3d.plan.recompute_order import check_recompute_order

            check_recompute_order(plan)

    def _made(self, num_microbatches: int) -> Job:
        config = self._config
        job, choice = replace(config.job, num_microbatches=num_microbatches), config.choice
        if choice.carries:
            share = choice.share
            if share is None:
                from megatron.fold3d.policy.backward_shares import FIRST_SHARE

                share = FIRST_SHARE  # until times are measured
            job = replace(job, shares=(share,) * (config.num_segments * config.num_ranks))
        if config.plan_file is not None:
            from megatron.fold3d.runtime.plan_from_file import read_order

            return replace(job, order=read_order(config, config.plan_file, num_microbatches))
        if not choice.fills_gaps:
            return job

        from megatron.fold3d.plan.passes.place_weight_grads import place_with_equal_times

        return replace(job, order=place_with_equal_times(job.computed, choice.held))

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Name the schedule in an error about its plan."""
        try:
            yield
        except PlanError as error:
            raise PlanError(f"{self.name}: {error}") from None
