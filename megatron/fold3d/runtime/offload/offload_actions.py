"""``--offload-activations``: handlers of OFFLOAD and RELOAD, and wrappers of computations."""

from megatron.fold3d.plan.ir import Action, Op, Plan
from megatron.fold3d.runtime.events import UNHEARD, Events
from megatron.fold3d.runtime.feature import Feature, Handlers, Iteration
from megatron.fold3d.runtime.offload.offloader import Offloader
from megatron.fold3d.runtime.plans import Plans


class Offload(Feature):
    """The offloader as a feature of the executor; inactive in evaluations, which save nothing.

    Args:
        offloader: moves the activations.
        plans: the plans of the run, whose offloads may change from iteration to iteration.
        recorder: hears of copies.
    """

    def __init__(self, offloader: Offloader, plans: Plans, recorder: Events = UNHEARD) -> None:
        self._offloader = offloader
        self._plans = plans
        self._recorder = recorder

    def choose_plan(self, plan: Plan, rank: int) -> Plan:
        """Return the plan with this rank's choice of offloads, unless the user's plan has some."""
        if self._plans.fixes_offload:
            return plan
        choice = self._offloader.choice(plan.programs[rank])
        return self._plans.training(plan.num_microbatches, choice)

    def prepare(self, iteration: Iteration) -> None:
        """Allocate the host memory that the program needs."""
        if iteration.trains:
            self._offloader.begin_iteration(
                iteration.program, iteration.chunks, iteration.hidden_bytes, self._recorder
            )

    def handlers(self, iteration: Iteration, inner: Handlers) -> Handlers:
        """Return handlers that copy activations, and wrappers that collect and restore them."""
        if not iteration.trains:
            return {}
        offloader = self._offloader
        run_forward, run_backward = inner[Op.FORWARD], inner[Op.BACKWARD]

        def forward(action: Action) -> None:
            with offloader.saving(action):
                run_forward(action)

        def backward(action: Action) -> None:
            with offloader.using(action):
                run_backward(action)

        def offload(action: Action) -> None:
            input_tensor, _ = iteration.saved[action.stage, action.microbatch]
            offloader.offload(action, held=input_tensor)

        return {
            Op.FORWARD: forward,
            Op.BACKWARD: backward,
            Op.OFFLOAD: offload,
            Op.RELOAD: offloader.reload,
        }
