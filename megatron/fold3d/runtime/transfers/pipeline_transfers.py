"""Handlers of SEND and RECV, and wrappers of the computations that need received tensors.

A RECV only posts its receive; the computation that needs the tensor waits for it. A pipeline of one
rank has no transfers and runs without this feature.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor

from megatron.fold3d.plan.ir import Action
from megatron.fold3d.plan.ops import BACK, FORTH, RECV_OPS, SEND_OPS, WAYS, Way
from megatron.fold3d.runtime.events import UNHEARD, Events
from megatron.fold3d.runtime.feature import Feature, Handler, Handlers, Iteration

if TYPE_CHECKING:
    from megatron.fold3d.runtime.transfers.p2p import P2P

    Connect = Callable[[dist.ProcessGroup, torch.device], P2P]


class PipelineTransfers(Feature):
    """The transfers of one rank.

    Args:
        connects: make the links, in the pipeline's process group; all ranks of the job call them
            together. A transfer takes the last links that carry it.
        recorder: hears when each transfer begins, and when a received tensor is taken.
    """

    evaluates = True
    draining = "its last sends"

    def __init__(self, connects: "Sequence[Connect]", recorder: Events = UNHEARD) -> None:
        self._connects, self._recorder = connects, recorder
        self._links: list[P2P] = []  # from the first iteration on

    def prepare(self, iteration: Iteration) -> None:
        """Connect in the first iteration, and reserve the host memory that transfers need."""
        if not self._links:
            pp_group, device = iteration.pp_group, iteration.device
            self._links = [connect(pp_group, device) for connect in self._connects]
        for link in self._links:
            link.begin_iteration(iteration.program, iteration.hidden_bytes)

    def handlers(self, iteration: Iteration, inner: Handlers) -> Handlers:
        """Return handlers of transfers, and wrappers that take inputs and announce sends."""
        recorder, ends = self._recorder, dict[Action, Callable[[], None]]()
        stages = range(iteration.plan.num_stages)
        taken = {FORTH: iteration.inputs, BACK: iteration.output_grads}
        computed = {FORTH.send: iteration.outputs, BACK.send: iteration.input_grads}

        def take(action: Action) -> torch.Tensor:
            with recorder.span(f"wait {action}", "wait"):
                tensor = self._link(action).take(action)
            ends.pop(action)()
            return tensor

        def computing(way: Way) -> Handler:
            def compute(action: Action) -> None:
                stage, _, microbatch = action
                if stage - way.step in stages:
                    tensor = take(Action(stage, way.receive, microbatch))
                    needs_grad = iteration.trains and way is FORTH
                    taken[way][stage, microbatch] = tensor.requires_grad_(needs_grad)
                if stage + way.step in stages:
                    sent = Action(stage, way.send, microbatch)
                    self._link(sent).announce(sent)
                inner[way.compute](action)

            return compute

        def post(action: Action) -> None:
            ends[action] = recorder.open_span(action, "p2p")
            shape, dtype = iteration.shapes[action.op], iteration.config.pipeline_dtype
            self._link(action).post(action, shape, dtype)

        def send(action: Action) -> None:
            recorder.open_span(action, "p2p")()  # nobody observes its end
            tensor = computed[action.op].pop((action.stage, action.microbatch))
            self._link(action).send(action, tensor)
            if iteration.trains and action.op is FORTH.send:
                deallocate_output_tensor(tensor, iteration.config.deallocate_pipeline_outputs)

        return {
            **{way.compute: computing(way) for way in WAYS},
            **dict.fromkeys(RECV_OPS, post),
            **dict.fromkeys(SEND_OPS, send),
        }

    def drain(self, iteration: Iteration) -> None:
        """Wait until every send has left."""
        for link in self._links:
            link.drain()

    def _link(self, action: Action) -> "P2P":
        return next(link for link in reversed(self._links) if link.carries(action))
