"""Run a plan over Megatron's model chunks: paper Algorithm 1, for any schedule.

`Executor` replaces Megatron's schedule functions and calls Megatron's own ``forward_step`` and
``backward_step``: loss scaling, recomputation, precision and models stay Megatron's. A plan decides
when something is computed, never what.

The executor looks up each action's op in a table of handlers. Features fill this table; see
`Feature`. `Iteration` has the innermost handlers.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch.distributed as dist
from megatron.core.pipeline_parallel.schedules import get_tensor_shapes
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron.fold3d.plan.ir import Action, Op, Plan
from megatron.fold3d.plan.ops import BACK, FORTH
from megatron.fold3d.runtime.feature import Feature, Handler, Handlers, Iteration, note_place
from megatron.fold3d.runtime.plans import Plans

logger = logging.getLogger(__name__)


class Executor:
    """The function that ``get_forward_backward_func`` returns: each call runs one iteration.

    It lives as long as the job and closes its features at the end.

    Args:
        plans: the plans to run, by number of micro-batches.
        features: the features that are on, outermost first.
    """

    def __init__(self, plans: Plans, features: Sequence[Feature]) -> None:
        self._plans = plans
        self._features = tuple(features)
        self._is_announced = False  # the plan, in the log
        self._where: tuple[int, str] | None = None  # the rank, and its place outside of the program

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
        """Train or evaluate on one batch, with the keywords of Megatron's schedules.

        Only the process group of ``p2p_communicator`` is used, since features make the transfers.

        Returns:
            On the last pipeline rank the loss function's reports, one per micro-batch; else empty.
        """
        if forward_only and num_microbatches < 1:
            return []  # `--eval-global-batch-size 0`: nothing is evaluated, with stock as well
        chunks = model if isinstance(model, list) else [model]
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        config = get_model_config(chunks[0])
        if problems := [*script_problems(config)]:  # what a script has set without a flag
            raise ValueError("\n".join(problems))
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        pp_group = p2p_communicator.pp_group if p2p_communicator else groups.pp
        sizes = {
            "seq_length": seq_length,
            "micro_batch_size": micro_batch_size,
            "decoder_seq_length": decoder_seq_length,
        }
        iteration = Iteration(
            rank=pp_group.rank(),
            plan=self._plan(num_microbatches, pp_group.rank(), trains=not forward_only),
            chunks=chunks,
            config=config,
            groups=groups,
            pp_group=pp_group,
            trains=not forward_only,
            shapes=_shapes(sizes, config, groups, adjust_tensor_shapes_fn),
            forward_step_func=forward_step_func,
            data_iterators=iterators,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
            force_all_reduce=force_all_reduce,
        )
        with iteration.ends:
            self._run_iteration(iteration)
        self._where = iteration.rank, "the optimizer step, or else between two iterations"
        return iteration.reports

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        """Close the features; an error outside of any action gets a note of the rank's place."""
        ends = ExitStack()
        ends.push(self._explain)
        for feature in self._features:
            ends.push(feature)
        ends.__exit__(*raised)

    def _plan(self, num_microbatches: int, rank: int, *, trains: bool) -> Plan:
        if not trains:
            return self._plans.evaluation(num_microbatches)
        job = self._plans.job(num_microbatches)
        for feature in self._features:
            job = feature.decide(job, rank)
        return self._plans.training(job)

    def _run_iteration(self, iteration: Iteration) -> None:
        features = [each for each in self._features if iteration.trains or each.evaluates]
        for feature in features:
            self._where = iteration.rank, feature.preparing
            feature.prepare(iteration)
        self._announce(iteration.plan)
        handlers = _table(features, iteration)
        with _timed(iteration.config):
            for action in iteration.program:
                try:
                    handlers[action.op](action)
                except BaseException as error:
                    note_place(error, iteration.rank, action)
                    raise
            for feature in reversed(features):
                self._where = iteration.rank, feature.draining
                feature.drain(iteration)

    def _announce(self, plan: Plan) -> None:
        """Log the plan at the first call."""
        if not self._is_announced and dist.get_rank() == 0:
            from megatron.fold3d.plan.memory import peak_activations  # no other rank needs it

            logger.info(
                "plan of %s: %s ranks, %s segments, %s micro-batches, activations held by rank: %s",
                self._plans.name,
                plan.num_ranks,
                plan.num_segments,
                plan.num_microbatches,
                ", ".join(map(str, peak_activations(plan))),
            )
        self._is_announced = True

    def _explain(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and self._where is not None:
            note_place(error, *self._where)


def _table(features: Sequence[Feature], iteration: Iteration) -> Handlers:
    """Return the handler of each op: the iteration's computations, wrapped by the features."""
    table: dict[Op, Handler] = dict.fromkeys(Op, _refuse_action)
    table |= {Op.FORWARD: iteration.forward, Op.BACKWARD: iteration.backward}
    for feature in reversed(features):
        table |= feature.handlers(iteration, table.copy())
    return table


def _refuse_action(action: Action) -> None:
    raise NotImplementedError(f"{action}: nothing that is on in this run handles {action.op}")


def script_problems(config: Any, process_non_loss_data: object = None) -> Iterator[str]:
    """Yield the settings that a script has made without a flag, and that no plan can run.

    Args:
        process_non_loss_data: ``process_non_loss_data_func`` of the script's ``pretrain``.
    """
    if config.variable_seq_lengths:
        yield (
            "variable_seq_lengths: transfers are posted before a shape could arrive; "
            "use sequences of one length, or --schedule stock"
        )
    if config.num_microbatches_with_partial_activation_checkpoints is not None:
        yield (
            "num_microbatches_with_partial_activation_checkpoints: it counts the micro-batches in "
            "flight of stock's schedules; use --recompute-granularity, or --schedule stock"
        )
    sizes = {
        f"--{name}-parallel-size {size}": size
        for name in ("pipeline-model", "tensor-model", "context", "expert-model")
        if (size := getattr(config, f"{name.replace('-', '_')}_parallel_size")) > 1
    }
    if process_non_loss_data is not None and sizes:
        yield (
            f"process_non_loss_data_func with {' '.join(sizes)}: Megatron 0.19.2 then has the last "
            "rank alone evaluate once more, which waits for the others for ever, with --schedule "
            "stock as well; give pretrain a non_loss_data_func, which all ranks call"
        )


def _shapes(
    sizes: Mapping[str, Any], config: Any, groups: Any, adjust: Callable[..., Any] | None
) -> dict[Op, Sequence[int]]:
    """Return the shapes of received tensors: ``[seq, batch, hidden]``, seq split by CP and SP."""
    received, sent = (
        get_tensor_shapes(**sizes, config=config, tp_group=groups.tp, cp_group=groups.cp)
        for _ in range(2)
    )
    if adjust is not None:
        received, sent = adjust(received, sent)
    return {FORTH.receive: received[0], BACK.receive: sent[0]}


@contextmanager
def _timed(config: Any) -> Iterator[None]:
    """Run Megatron's ``forward-backward`` timer around an iteration, as its own schedules do."""
    if config.timers is None:
        yield
        return
    timer = config.timers("forward-backward", log_level=1)
    timer.start(barrier=config.barrier_with_L1_time)
    yield
    timer.stop()
