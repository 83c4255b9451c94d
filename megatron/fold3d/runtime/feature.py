"""`Feature` extends the executor by one capability; `Iteration` is the state that features share.

For each iteration the executor makes a new table with a handler for each op. Features fill the
table, from the innermost outwards: each receives the table so far, and returns handlers for its own
ops and wrappers around other features' handlers (docs/architecture.md, Executor and features). A
feature that is off is not in the list.

Keeps one invariant: a feature may change when something happens, never what is computed.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, Self

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.schedules import (
    backward_step,
    check_first_val_step,
    forward_step,
)

from megatron.fold3d.plan.compile import Job
from megatron.fold3d.plan.ir import Action, Op, Plan, Program
from megatron.fold3d.plan.ops import FORTH

Handler = Callable[[Action], None]
Handlers = Mapping[Op, Handler]
Key = tuple[int, int | None]
"""Stage and micro-batch."""


@dataclass(kw_only=True)
class Iteration:
    """One call of the executor: its plan, the model, and the tensors between computations.

    Attributes:
        chunks: this rank's model chunks, by segment; ``data_iterators`` are theirs.
        trains: False for an evaluation, which has forwards only.
        shapes: the shapes of received tensors, by op: ``[seq, batch, hidden]``.
        forward_step_func: this and all below are options of Megatron's schedule functions.
        ends: callbacks that run when the iteration ends, also after an error.
        saved: input and output of each forward whose backward has not run.
        inputs: stage inputs that were received and not used yet.
        outputs: stage outputs that were computed and not sent yet.
        output_grads: gradients of outputs that were received and not used yet.
        input_grads: gradients of inputs that were computed and not sent yet.
        unfinished: by stage, the parameters whose gradients are not complete yet, if weight
            gradients are computed parameter by parameter.
        num_tokens: the number of tokens over which Megatron averages the loss, 0-d int32.
        reports: the loss function's reports, one per micro-batch.

    The tensors between computations are hidden states or their gradients, ``[seq, batch, hidden]``
    in ``config.pipeline_dtype``, with seq split by context and sequence parallelism. The last
    stage's output is its loss, 0-d. The iteration owns them; they are on ``device`` and valid on
    the compute stream, which is current in every handler.
    """

    rank: int
    plan: Plan
    chunks: Sequence[torch.nn.Module]
    config: Any
    groups: Any
    pp_group: dist.ProcessGroup
    trains: bool
    shapes: Mapping[Op, Sequence[int]]
    forward_step_func: Callable[..., Any]
    data_iterators: Sequence[Any]
    collect_non_loss_data: bool
    first_val_step: bool | None
    force_all_reduce: bool | None
    ends: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.device = next(self.chunks[0].parameters()).device
        self.num_tokens = torch.zeros([], dtype=torch.int, device=self.device)
        self.reports: list[Any] = []
        self.saved: dict[Key, tuple[torch.Tensor | None, torch.Tensor]] = {}
        self.inputs: dict[Key, torch.Tensor] = {}
        self.outputs: dict[Key, torch.Tensor] = {}
        self.output_grads: dict[Key, torch.Tensor] = {}
        self.input_grads: dict[Key, torch.Tensor] = {}
        self.unfinished: dict[int, set[torch.Tensor]] = {}

    @property
    def program(self) -> Program:
        """The actions of this rank, in order."""
        return self.plan.programs[self.rank]

    @property
    def hidden_bytes(self) -> int:
        """The bytes of one hidden state, and so of one transfer."""
        num_elements = torch.Size(self.shapes[FORTH.receive]).numel()
        return int(num_elements * self.config.pipeline_dtype.itemsize)

    @property
    def hooks_wait(self) -> bool:
        """Whether DDP's hooks wait for the plan's all-gathers; not before Megatron's first step."""
        return self.config.param_sync_func is not None

    def segment(self, action: Action) -> int:
        """Return the segment of an action: the index of its model chunk."""
        return action.stage // self.plan.num_ranks

    def forward(self, action: Action) -> None:
        """Run one micro-batch's forward of a model chunk.

        Takes the input from ``inputs``, unless this is the first stage, and puts the output into
        ``outputs``, unless it is the last. In training both are in ``saved`` until the backward.
        """
        stage, _, microbatch = action
        segment = self.segment(action)
        input_tensor = self.inputs.pop((stage, microbatch), None)
        is_last_stage = stage == self.plan.num_stages - 1
        output, num_tokens = forward_step(
            self.forward_step_func,
            self.data_iterators[segment],
            self.chunks[segment],
            self.plan.num_microbatches,
            input_tensor,
            self.reports,
            self.config,
            self.groups.cp.size(),
            self.collect_non_loss_data,
            is_first_microbatch=check_first_val_step(
                self.first_val_step, not self.trains, microbatch == 0
            ),
            current_microbatch=microbatch,
            vp_stage=segment if len(self.chunks) > 1 else None,
            is_last_stage=is_last_stage,
        )
        self.num_tokens += num_tokens
        if not is_last_stage:
            self.outputs[stage, microbatch] = output
        if self.trains:
            self.saved[stage, microbatch] = input_tensor, output

    def backward(self, action: Action) -> None:
        """Run one micro-batch's backward of a model chunk.

        Takes the output's gradient from ``output_grads``, unless this is the last stage, and puts
        the input's gradient into ``input_grads``, unless it is the first.
        """
        key = action.stage, action.microbatch
        input_tensor, output = self.saved.pop(key)
        output_grad = self.output_grads.pop(key, None)
        input_grad = backward_step(input_tensor, output, output_grad, self.config)
        if action.stage > 0:
            self.input_grads[key] = input_grad


class Feature:
    """One capability of the executor. A subclass overrides the methods it needs.

    Attributes:
        evaluates: whether it takes part in evaluations, which have forwards and transfers only.
        preparing: names the place in errors that `prepare` raises.
        draining: names the place in errors that `drain` raises.
    """

    evaluates = False
    preparing = "the beginning of an iteration"
    draining = "the end of its program"

    def decide(self, job: Job, rank: int) -> Job:
        """Return the job that an iteration of training runs; outermost features first.

        Args:
            job: the job of the flags, or the one that outer features have returned.
        """
        return job

    def prepare(self, iteration: Iteration) -> None:
        """Prepare for an iteration; outermost features first, on all ranks together."""

    def handlers(self, iteration: Iteration, inner: Handlers) -> Handlers:
        """Return the handlers of this feature, by op.

        Args:
            inner: the handler of each op so far; a handler that wraps such a handler calls it.
        """
        return {}

    def drain(self, iteration: Iteration) -> None:
        """Finish all work that is in flight after the program; innermost features first."""

    def close(self, error: BaseException | None) -> None:
        """End the run, after an ``error`` or without; innermost features first."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Close; `SystemExit` does not count as an error."""
        self.close(None if isinstance(error, SystemExit) else error)


def note_place(error: BaseException, rank: int, place: object) -> None:
    """Add a note with the pipeline rank's place, such as an action, to an error without one."""
    where = f"fold3d: rank {os.environ.get('RANK', '0')} (pipeline rank {rank}) was at "
    if not any(note.startswith(where) for note in getattr(error, "__notes__", ())):
        error.add_note(f"{where}{place}")


def within(context: Callable[[Action], AbstractContextManager[object]], run: Handler) -> Handler:
    """Return a handler that runs ``run`` in the context that ``context`` makes for the action."""

    def handler(action: Action) -> None:
        with context(action):
            run(action)

    return handler
