"""Handlers of SEND and RECV, and wrappers of the computations that need received tensors.

A RECV only posts its receive; the computation that needs the tensor waits for it. A pipeline of one
rank has no transfers and runs without this feature.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor

from megatron.fold3d.plan.ir import Action, Op
from megatron.fold3d.runtime.feature import Feature, Handlers, Iteration

if TYPE_CHECKING:
    from megatron.fold3d.runtime.transfers.carrier import Transfers


class PipelineTransfers(Feature):
    """The transfers of one rank.

    Args:
        connect: makes the links to the neighbours; all ranks of the job call it together.
    """

    draining = "its last sends"

    def __init__(self, connect: Callable[[dist.ProcessGroup, torch.device], "Transfers"]) -> None:
        self._connect = connect
        self._links: list[Transfers] = []  # one, from the first iteration on

    def prepare(self, iteration: Iteration) -> None:
        """Connect in the first iteration, and reserve the host memory that transfers need."""
        if not self._links:
            self._links.append(self._connect(iteration.pp_group, iteration.device))
        self._links[0].begin_iteration(iteration.program, iteration.hidden_bytes)

    def handlers(self, iteration: Iteration, inner: Handlers) -> Handlers:
        """Return handlers of transfers, and wrappers that take inputs and announce sends."""
        (p2p,) = self._links
        run_forward, run_backward = inner[Op.FORWARD], inner[Op.BACKWARD]
        last_stage = iteration.plan.num_stages - 1
        deallocates = iteration.config.deallocate_pipeline_outputs

        def forward(action: Action) -> None:
            stage, _, microbatch = action
            if stage > 0:
                tensor = p2p.take(Action(stage, Op.RECV_F, microbatch))
                iteration.inputs[stage, microbatch] = tensor.requires_grad_(iteration.trains)
            if stage < last_stage:
                p2p.announce(Action(stage, Op.SEND_F, microbatch))
            run_forward(action)

        def backward(action: Action) -> None:
            stage, _, microbatch = action
            if stage < last_stage:
                received = Action(stage, Op.RECV_B, microbatch)
                iteration.output_grads[stage, microbatch] = p2p.take(received)
            if stage > 0:
                p2p.announce(Action(stage, Op.SEND_B, microbatch))
            run_backward(action)

        def post(action: Action) -> None:
            p2p.post(action, iteration.shapes[action.op], iteration.config.pipeline_dtype)

        def send_output(action: Action) -> None:
            output = iteration.outputs.pop((action.stage, action.microbatch))
            p2p.send(action, output)
            if iteration.trains:
                deallocate_output_tensor(output, deallocates)

        def send_input_grad(action: Action) -> None:
            p2p.send(action, iteration.input_grads.pop((action.stage, action.microbatch)))

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
        self._links[0].drain()
