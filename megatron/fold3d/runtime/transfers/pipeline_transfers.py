"""Handlers of SEND and RECV, and wrappers of the computations that need received tensors.

A RECV only posts its receive; the computation that needs the tensor waits for it. A pipeline of one
rank has no transfers and runs without this feature.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor

from megatron.fold3d.plan.ir import Action, Op
from megatron.fold3d.runtime.events import UNHEARD, Events
from megatron.fold3d.runtime.feature import Feature, Handlers, Iteration

if TYPE_CHECKING:
    from megatron.fold3d.runtime.transfers.host_link import HostLink
    from megatron.fold3d.runtime.transfers.p2p import P2P

    Links = P2P | HostLink
    Connect = Callable[[dist.ProcessGroup, torch.device], Links]


class PipelineTransfers(Feature):
    """The transfers of one rank.

    Args:
        connects: make the links, in the pipeline's process group; all ranks of the job call them
            together. A transfer takes the last links that carry it.
        recorder: hears when each transfer begins, and when a received tensor is taken.
    """

    draining = "its last sends"

    def __init__(self, connects: "Sequence[Connect]", recorder: Events = UNHEARD) -> None:
        self._connects, self._recorder = connects, recorder
        self._links: list[Links] = []  # from the first iteration on

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
        run_forward, run_backward = inner[Op.FORWARD], inner[Op.BACKWARD]
        last_stage = iteration.plan.num_stages - 1
        deallocates = iteration.config.deallocate_pipeline_outputs

        def take(action: Action) -> torch.Tensor:
            with recorder.span(f"wait {action}", "wait"):
                tensor = self._link(action).take(action)
            ends.pop(action)()
            return tensor

        def send(action: Action, tensor: torch.Tensor) -> None:
            recorder.open_span(action, "p2p")()  # nobody observes its end
            self._link(action).send(action, tensor)

        def forward(action: Action) -> None:
            stage, _, microbatch = action
            if stage > 0:
                tensor = take(Action(stage, Op.RECV_F, microbatch))
                iteration.inputs[stage, microbatch] = tensor.requires_grad_(iteration.trains)
            if stage < last_stage:
                sent = Action(stage, Op.SEND_F, microbatch)
                self._link(sent).announce(sent)
            run_forward(action)

        def backward(action: Action) -> None:
            stage, _, microbatch = action
            if stage < last_stage:
                received = Action(stage, Op.RECV_B, microbatch)
                iteration.output_grads[stage, microbatch] = take(received)
            if stage > 0:
                sent = Action(stage, Op.SEND_B, microbatch)
                self._link(sent).announce(sent)
            run_backward(action)

        def post(action: Action) -> None:
            ends[action] = recorder.open_span(action, "p2p")
            shape, dtype = iteration.shapes[action.op], iteration.config.pipeline_dtype
            self._link(action).post(action, shape, dtype)

        def send_output(action: Action) -> None:
            output = iteration.outputs.pop((action.stage, action.microbatch))
            send(action, output)
            if iteration.trains:
                deallocate_output_tensor(output, deallocates)

        def send_input_grad(action: Action) -> None:
            send(action, iteration.input_grads.pop((action.stage, action.microbatch)))

        return {
            Op.FORWARD: forward,
            Op.BACKWARD: backward,
            Op.RECV_F: post,
            Op.RECV_B: post,
            Op.SEND_F: send_output,
            Op.SEND_B: send_input_grad,
        }

    def drain(self, iteration: Iteration) -> None:
        """Wait until every send has left."""
        for link in self._links:
            link.drain()

    def _link(self, action: Action) -> "Links":
        return next(link for link in reversed(self._links) if link.carries(action))
