"""Run a plan over Megatron's model chunks: paper Algorithm 1, for any schedule.

`Executor` stands where Megatron's schedule functions stand and calls Megatron's own
``forward_step`` and ``backward_step``: loss scaling, recomputation, precision and models stay
Megatron's. A plan decides when something is computed, never what.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.schedules import (
    backward_step,
    check_first_val_step,
    deallocate_output_tensor,
    forward_step,
    get_tensor_shapes,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron.fold3d.config.fold3d_config import Fold3DConfig
from megatron.fold3d.plan.ir import Action, Op, Plan, Program
from megatron.fold3d.plan.memory import peak_activations
from megatron.fold3d.plan.passes.grad_sync import deferred_stages
from megatron.fold3d.plan.passes.weight_grads import split_stages
from megatron.fold3d.runtime.early_recompute import EarlyRecompute
from megatron.fold3d.runtime.grad_sync.ddp_sync import GradSync
from megatron.fold3d.runtime.grad_sync.deferred_sync import DeferredSync
from megatron.fold3d.runtime.offload.offloader import Offloader
from megatron.fold3d.runtime.plans import Plans
from megatron.fold3d.runtime.preemption.communicator import PreemptiveCommunicator
from megatron.fold3d.runtime.preemption.route_buckets import hand_over, neighbours
from megatron.fold3d.runtime.trace.recorder import Recorder, never
from megatron.fold3d.runtime.transfers.p2p import P2P
from megatron.fold3d.runtime.weight_grads.delayed_linear import DelayedWeightGrads

logger = logging.getLogger(__name__)

_WAS_AT = "fold3d: pipeline rank"
_Key = tuple[int, int | None]  # stage, micro-batch


class Executor:
    """What ``get_forward_backward_func`` returns: each call runs one iteration.

    It lives as long as the job: process groups and plans are made when a call first needs them.
    """

    def __init__(
        self,
        config: Fold3DConfig,
        plans: Plans,
        deferred: DeferredSync | None = None,
        recorder: Recorder | None = None,
        offloader: Offloader | None = None,
        communicator: PreemptiveCommunicator | None = None,
        weight_grads: DelayedWeightGrads | None = None,
        recompute: EarlyRecompute | None = None,
    ) -> None:
        self._timeout = timedelta(minutes=config.distributed_timeout_minutes)
        self._lazy = config.lazy_inter_segment
        self._pp_class, self._dp_class = config.pp_traffic_class, config.dp_traffic_class
        self._plans = plans
        self._deferred = deferred
        self._recorder = recorder or never(torch.device(config.device))
        self._offloader = offloader
        self._communicator = communicator
        self._weight_grads = weight_grads
        self._recompute = recompute
        self._started = False
        self._where: tuple[int, str] | None = None  # the rank, and where it is beside its program
        self._p2p: P2P | None = None

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: Any = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
    ) -> list[Any]:
        """Train or evaluate on one batch; the keywords are those of Megatron's schedules.

        Of ``p2p_communicator`` only the pipeline group is used: the transfers are ours.

        Returns:
            On the last pipeline rank what the loss function reports, one value per micro-batch.
        """
        chunks = model if isinstance(model, list) else [model]
        config = get_model_config(chunks[0])
        _refuse(config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        pp_group = p2p_communicator.pp_group if p2p_communicator else groups.pp
        rank = pp_group.rank()
        plan = self._plan(num_microbatches, rank, trains=not forward_only)
        program = plan.programs[rank]
        sizes = {
            "seq_length": seq_length,
            "micro_batch_size": micro_batch_size,
            "decoder_seq_length": decoder_seq_length,
        }
        shapes = _shapes(sizes, config, groups, adjust_tensor_shapes_fn)
        hidden_bytes = math.prod(shapes[Op.RECV_F]) * config.pipeline_dtype.itemsize
        self._start(plan, pp_group, groups, chunks, hidden_bytes)
        self._prepare(rank, program, chunks, groups, hidden_bytes, trains=not forward_only)
        with _timed(config):
            with GradSync(
                config,
                chunks,
                trains=not forward_only,
                deferred=self._deferred,
                deferred_segments={stage // plan.num_ranks for stage in deferred_stages(program)},
            ) as grad_sync:
                iteration = _Iteration(
                    plan=plan,
                    chunks=chunks,
                    iterators=data_iterator if isinstance(data_iterator, list) else [data_iterator],
                    forward_step_func=forward_step_func,
                    config=config,
                    cp_size=groups.cp.size(),
                    forward_only=forward_only,
                    collect_non_loss_data=collect_non_loss_data,
                    first_val_step=first_val_step,
                    shapes=shapes,
                    p2p=self._p2p,
                    grad_sync=grad_sync,
                    recorder=self._recorder,
                    offloader=None if forward_only else self._offloader,
                    weight_grads=self._weight_grads,
                    recompute=self._recompute,
                )
                iteration.run(rank)
            self._where = rank, "the last sums of gradients, behind its program"
            if self._deferred is not None:
                self._deferred.finish_backward()
            if config.finalize_model_grads_func is not None and not forward_only:
                config.finalize_model_grads_func(
                    chunks,
                    iteration.num_tokens if config.calculate_per_token_loss else None,
                    pg_collection=groups,
                    force_all_reduce=force_all_reduce,
                )
            self._where = rank, "its last sends"
            if self._p2p is not None:
                self._p2p.drain()
            if self._communicator is not None:
                self._communicator.check()
        self._where = rank, "the optimizer step, or else between two iterations"
        return iteration.reports

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Let an error that no action explains say how far its rank had come."""
        explained = any(note.startswith(_WAS_AT) for note in getattr(error, "__notes__", ()))
        if error is not None and self._where is not None and not explained:
            error.add_note("{} {} was at {}".format(_WAS_AT, *self._where))

    def _plan(self, num_microbatches: int, rank: int, *, trains: bool) -> Plan:
        """Return what is to run; what of it is offloaded may change from call to call."""
        if not trains:
            return self._plans.evaluation(num_microbatches)
        plan = self._plans.training(num_microbatches)
        if self._offloader is None or self._plans.fixes_offload:
            return plan
        return self._plans.training(num_microbatches, self._offloader.choice(plan.programs[rank]))

    def _prepare(
        self,
        rank: int,
        program: Program,
        chunks: Sequence[torch.nn.Module],
        groups: Any,
        hidden_bytes: int,
        *,
        trains: bool,
    ) -> None:
        """Get all that takes part in an iteration ready for its program."""
        self._where = rank, "WAIT_GRAD before evaluation"
        if self._deferred is not None and trains:
            self._deferred.prepare(chunks, groups)
        elif self._deferred is not None:
            self._deferred.drain()  # what is evaluated is the model of the last iteration
        if self._communicator is not None:
            hand_over(chunks, self._communicator, self._timeout, self._dp_class)
        if self._p2p is not None:
            self._p2p.begin(program, hidden_bytes)
        if self._weight_grads is not None:
            split = split_stages(program)
            self._weight_grads.choose({stage: chunks[stage // groups.pp.size()] for stage in split})
        if self._recompute is not None:
            self._recompute.begin(program)
        if self._offloader is not None and trains:
            self._offloader.begin(program, chunks, hidden_bytes, self._recorder)

    def _start(
        self,
        plan: Plan,
        pp_group: Any,
        groups: Any,
        chunks: Sequence[torch.nn.Module],
        transfer_bytes: int,
    ) -> None:
        """At the first call, connect to the neighbours and say what is going to run."""
        if self._started:
            return
        self._started = True
        device = _device(chunks)
        if self._communicator is not None:
            self._communicator.connect(neighbours(pp_group, chunks))
            self._communicator.fit_slices(transfer_bytes, groups.dp_cp, device)
        if plan.num_ranks > 1:
            self._p2p = P2P(
                pp_group,
                device,
                self._timeout,
                lazy=self._lazy,
                communicator=self._communicator,
                traffic_class=self._pp_class,
            )
        if dist.get_rank() == 0:
            logger.info(
                "plan of %s: %s ranks, %s segments, %s micro-batches, activations held by rank: %s",
                self._plans.name,
                plan.num_ranks,
                plan.num_segments,
                plan.num_microbatches,
                ", ".join(map(str, peak_activations(plan))),
            )


@dataclass(kw_only=True)
class _Iteration:
    """The tensors of one iteration, and what each kind of action does with them."""

    plan: Plan
    chunks: Sequence[torch.nn.Module]
    iterators: Sequence[Any]
    forward_step_func: Callable[..., Any]
    config: Any
    cp_size: int
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None
    shapes: Mapping[Op, Sequence[int]]
    p2p: P2P | None
    grad_sync: GradSync
    recorder: Recorder
    offloader: Offloader | None
    weight_grads: DelayedWeightGrads | None
    recompute: EarlyRecompute | None

    def __post_init__(self) -> None:
        self.num_tokens = torch.zeros([], dtype=torch.int, device=_device(self.chunks))
        self.reports: list[Any] = []
        self._saved: dict[_Key, tuple[torch.Tensor | None, torch.Tensor]] = {}  # for backward
        self._outputs: dict[_Key, torch.Tensor] = {}  # computed, not sent yet
        self._input_grads: dict[_Key, torch.Tensor] = {}
        self._split: frozenset[int] = frozenset()  # stages with weight gradients of their own
        self._last_backward: set[Action] = set()  # of the others
        self._arriving: dict[Action, Callable[[], None]] = {}  # posted, to be recorded when taken

    def run(self, rank: int) -> None:
        """Run the program of a pipeline rank."""
        program = self.plan.programs[rank]
        self._split = split_stages(program)
        backwards = {action.stage: action for action in program if action.op is Op.BACKWARD}
        self._last_backward = {b for stage, b in backwards.items() if stage not in self._split}
        for action in program:
            try:
                self._act(action)
            except Exception as error:
                error.add_note(f"{_WAS_AT} {rank} was at {action}")
                raise

    def _act(self, action: Action) -> None:
        stage, op, microbatch = action
        key, segment = (stage, microbatch), stage // self.plan.num_ranks
        if op is Op.FORWARD:
            self._forward(action, segment)
        elif op is Op.BACKWARD:
            self._backward(action, segment)
        elif op is Op.WEIGHT and self.weight_grads is not None:
            with self.recorder.span(action, "compute"):
                self.weight_grads.compute(action)
        elif op is Op.RECOMPUTE and self.recompute is not None:
            with self.recorder.span(action, "compute"):
                self.recompute.compute(action)
        elif op is Op.OFFLOAD and self.offloader is not None:
            self.offloader.offload(action, held=self._saved[key][0])
        elif op is Op.RELOAD and self.offloader is not None:
            self.offloader.reload(action)
        elif op is Op.REDUCE_GRAD:
            self.grad_sync.reduce(segment)
        elif op is Op.WAIT_GRAD:
            with self.recorder.span(action, "wait"):
                self.grad_sync.wait(segment)
        elif op is Op.GATHER_PARAM:
            self.grad_sync.gather(segment)
        elif op is Op.WAIT_PARAM:
            pass  # DDP's hooks wait in the forward, so that a layer waits for its own buckets only
        elif self.p2p is None:
            raise NotImplementedError(f"{action} on a pipeline of one rank")
        elif op is Op.SEND_F:
            output = self._outputs.pop(key)
            self._send(action, output)
            if not self.forward_only:
                deallocate_output_tensor(output, self.config.deallocate_pipeline_outputs)
        elif op is Op.SEND_B:
            self._send(action, self._input_grads.pop(key))
        elif op in self.shapes:
            self._arriving[action] = self.recorder.begin(action, "p2p")
            self.p2p.post(action, self.shapes[op], self.config.pipeline_dtype)
        else:
            raise NotImplementedError(f"{action}: the executor has no {op} yet")

    def _forward(self, action: Action, segment: int) -> None:
        stage, _, microbatch = action
        input_tensor = None
        if self.p2p is not None and stage > 0:
            input_tensor = self._take(Action(stage, Op.RECV_F, microbatch), action)
            input_tensor.requires_grad_(not self.forward_only)
        is_last_stage = stage == self.plan.num_stages - 1
        if self.p2p is not None and not is_last_stage:
            self.p2p.announce(Action(stage, Op.SEND_F, microbatch))
        if self.recompute is not None:
            self.recompute.begin_forward(action)
        saving = nullcontext() if self.offloader is None else self.offloader.saving(action)
        with self.recorder.span(action, "compute"), saving:
            output, num_tokens = forward_step(
                self.forward_step_func,
                self.iterators[segment],
                self.chunks[segment],
                self.plan.num_microbatches,
                input_tensor,
                self.reports,
                self.config,
                self.cp_size,
                self.collect_non_loss_data,
                is_first_microbatch=check_first_val_step(
                    self.first_val_step, self.forward_only, microbatch == 0
                ),
                current_microbatch=microbatch,
                vp_stage=segment if len(self.chunks) > 1 else None,
                is_last_stage=is_last_stage,
            )
        self.num_tokens += num_tokens
        if not is_last_stage:
            self._outputs[stage, microbatch] = output
        if not self.forward_only:
            self._saved[stage, microbatch] = input_tensor, output

    def _backward(self, action: Action, segment: int) -> None:
        stage, _, microbatch = action
        output_grad = None
        if self.p2p is not None and stage < self.plan.num_stages - 1:
            output_grad = self._take(Action(stage, Op.RECV_B, microbatch), action)
        if self.p2p is not None and stage > 0:
            self.p2p.announce(Action(stage, Op.SEND_B, microbatch))
        if action in self._last_backward:
            self.grad_sync.release(segment)
        if self.weight_grads is not None and stage in self._split:
            self.weight_grads.begin_backward(action)
        input_tensor, output = self._saved.pop((stage, microbatch))
        using = nullcontext() if self.offloader is None else self.offloader.using(action)
        with self.recorder.span(action, "compute"), using:
            input_grad = backward_step(input_tensor, output, output_grad, self.config)
        if stage > 0:
            self._input_grads[stage, microbatch] = input_grad

    def _take(self, receive: Action, computation: Action) -> torch.Tensor:
        """Return what a computation needs from its neighbour, once it is here."""
        assert self.p2p is not None
        with self.recorder.span(f"wait {computation}", "wait"):
            tensor = self.p2p.take(receive)
        self._arriving.pop(receive)()
        return tensor

    def _send(self, send: Action, tensor: torch.Tensor) -> None:
        assert self.p2p is not None
        self.recorder.begin(send, "p2p")()
        self.p2p.send(send, tensor)


def _refuse(config: Any) -> None:
    """Refuse what has no flag and can only come from code that builds the model's configuration."""
    if config.variable_seq_lengths:
        raise ValueError(
            "variable_seq_lengths: transfers are posted before a shape could arrive; "
            "use sequences of one length, or Megatron's own schedule"
        )
    if config.num_microbatches_with_partial_activation_checkpoints is not None:
        raise ValueError(
            "num_microbatches_with_partial_activation_checkpoints: it counts the micro-batches in "
            "flight of stock's schedules; use --recompute-granularity, or Megatron's own schedule"
        )


def _shapes(
    sizes: Mapping[str, Any], config: Any, groups: Any, adjust: Callable[..., Any] | None
) -> dict[Op, Sequence[int]]:
    """What a rank receives, as Megatron has it: ``[seq, batch, hidden]``, seq split by CP, SP."""
    received, sent = (
        get_tensor_shapes(**sizes, config=config, tp_group=groups.tp, cp_group=groups.cp)
        for _ in range(2)
    )
    if adjust is not None:
        received, sent = adjust(received, sent)
    return {Op.RECV_F: received[0], Op.RECV_B: sent[0]}


def _device(chunks: Sequence[torch.nn.Module]) -> torch.device:
    return next(chunks[0].parameters()).device


@contextmanager
def _timed(config: Any) -> Iterator[None]:
    """Megatron's timer around the whole iteration, as its own schedules have it."""
    if config.timers is None:
        yield
        return
    timer = config.timers("forward-backward", log_level=1)
    timer.start(barrier=config.barrier_with_L1_time)
    yield
    timer.stop()
