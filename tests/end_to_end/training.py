"""One training run inside a rank, and all of it that a schedule must not change, bit for bit."""

import functools
import hashlib
import inspect
import logging
import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.fold3d.observe.trace_files import Event, RankTrace
from megatron.fold3d.plan.ir import Action, Op, Program, carried, hooked
from megatron.fold3d.plan.ops import (
    COMPUTE_OPS,
    GATHER_OPS,
    HOST_OPS,
    SUM_OPS,
    TABLE,
    UPDATE_OPS,
    Place,
)
from megatron.fold3d.plan.passes.early_grad_sync import stages_in_parts
from megatron.fold3d.policy.predicted import Predictions
from tests.distributed import run_distributed

TINY = (
    "--device cpu --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --attention-dropout 0 --hidden-dropout 0 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 63 --num-workers 0 --micro-batch-size 1"
)
"""A model whose iteration takes milliseconds; the number of layers and the rest are a test's."""

once = functools.cache(run_distributed)
"""What ranks record, run once for all tests of a worker that compare with it: change nothing."""

TRACED = 3
"""The iteration that is compared: hooks run from the second on, and no evaluation is near."""
_STARTS = {row.place for row in TABLE.values()} - {
    *(TABLE[op].place for op in HOST_OPS | UPDATE_OPS),
    Place.DP_SYNC_KEPT,  # it starts nothing if Megatron reads nothing
}
_KINDS = ("compute", "p2p", "grad_sync", "param_gather", "offload")


@dataclass(slots=True)
class Record:
    """What one rank saw: exact floats in hexadecimal, tensors as digests of their raw bytes.

    Attributes:
        iterations: of each training iteration the losses (on the last pipeline rank), the
            gradients' norm, and whether the update was skipped.
        evaluations: the losses of each evaluation, on the last pipeline rank.
        parameters: of every model chunk, after the last iteration.
        layers: the same, by the layer's number in the whole model.
        optimizer: its own parameters (fp32 masters, shards) and moments.
    """

    iterations: list[dict[str, str]] = field(default_factory=list)
    evaluations: list[dict[str, str]] = field(default_factory=list)
    parameters: dict[str, str] = field(default_factory=dict)
    layers: dict[str, str] = field(default_factory=dict)
    optimizer: dict[str, str] = field(default_factory=dict)


def marked(rows: Iterable[Any]) -> list[Any]:
    """Return rows as a test's parameters; those that repeat what others show are `stress`."""
    return [pytest.param(row, marks=[pytest.mark.stress] if row.repeats else []) for row in rows]


def train(argv: Sequence[str], script: str = "pretrain_gpt") -> Record:
    """Run the script on this rank with a recorder in Megatron's training loop."""
    from megatron.fold3d.training import launch

    launch.MISTAKES = ()  # none is caught: here the traceback is wanted, on whichever rank
    return recorded(lambda: import_module(script).main(argv))


def train_as_planned(argv: Sequence[str], folder: Path, script: str = "pretrain_gpt") -> Record:
    """Train, and check that in one iteration this rank starts what its plan says, in order."""
    from megatron.fold3d.runtime.executor import Executor

    programs: list[Program] = []

    def note(_: Executor, iteration: Any, *__: Any) -> None:
        if iteration.trains:
            programs.append(iteration.program)

    watch(Executor, "_run_iteration", note)
    record = train([*argv, f"--trace={folder}", f"--trace-iterations={TRACED}-{TRACED}"], script)
    rank = int(os.environ["RANK"])
    trace = RankTrace.from_json((folder / f"rank-{rank:05}.json").read_text())
    planned, started = words(trace.iterations[-1].events, programs[TRACED - 1])
    assert started == planned, f"started {' '.join(started)}, planned {' '.join(planned)}"
    return record


def train_with_engine(
    argv: Sequence[str], folder: Path | None = None, *, fuses: bool = False
) -> Record:
    """Train with modules that stand in for Transformer Engine's, as planned if there is a folder.

    They need a GPU; ``fuses`` is whether matmuls add to ``main_grad`` themselves.
    """
    from tests.runtime.weight_grads import engine

    with engine.installed(fuses=fuses):
        return train_as_planned(argv, folder) if folder else train(argv)


def words(events: Sequence[Event], program: Program) -> tuple[list[str], list[str]]:
    """Return what a rank should start in an iteration, and what it did start, in order.

    Of a sum of several collectives, the first one counts. DDP's hooks start sums inside a backward,
    so before the transfers behind it. What is planned may find nothing to do: a part for which
    nothing is complete in every shard, what an iteration has left that waited for all gradients,
    or a gather behind a step that was skipped, or that has started it. Gathers that no plan has are
    started by DDP's hooks or by the optimizer's step.
    """
    late = carried(program)
    started = dict.fromkeys(event.name for event in events if event.kind in _KINDS)
    planned = {str(action): action for action in program if TABLE[action.op].place in _STARTS}
    gathers = {str(action) for action in program if action.op in GATHER_OPS}
    idle = {
        name
        for name, action in planned.items()
        if action.op is Op.REDUCE_SCATTER
        and action.microbatch
        and action.stage in stages_in_parts(program)
    } | gathers
    idle |= {str(a) for i, a in enumerate(program) if a.op in SUM_OPS and i < late.get(a.stage, 0)}
    by_hooks = {str(a) for a in program if a.op in SUM_OPS and a.stage in hooked(program)}
    return (
        _behind_computations((n for n in planned if n in started or n not in idle), by_hooks),
        _behind_computations(
            (n for n in started if n in gathers or Action.from_str(n).op not in GATHER_OPS),
            by_hooks,
        ),
    )


def _behind_computations(names: Iterable[str], moved: Container[str]) -> list[str]:
    """Move some actions to right behind the computation that they follow."""
    found: list[str] = []
    last = 0
    for name in names:
        if name in moved:
            found.insert(last, name)
        else:
            found.append(name)
        if Action.from_str(name).op in COMPUTE_OPS:
            last = len(found)
    return found


def recorded(
    main: Callable[[], object], *, awaits_search: bool = True, loops: Sequence[Any] = ()
) -> Record:
    """Call what trains, with a recorder in the training loop.

    Unless ``awaits_search`` is False, a search is over in the iteration that begins it, so that it
    is known which iteration runs what.

    Args:
        loops: the modules of ``train_step`` and of ``evaluate``, if they are not Megatron's.
    """
    from megatron.core.utils import unwrap_model
    from megatron.training import training

    from megatron.fold3d.training import search_process

    if awaits_search:
        search_process.SearchProcess = FinishedSearch  # type: ignore[assignment,misc]
    record = Record()
    trained: dict[str, Any] = {}
    stepping, evaluating = loops or (training, training)
    evaluation = inspect.signature(evaluating.evaluate)

    def note_step(result: Any, *args: Any, **_: Any) -> None:
        _, _, trained["model"], trained["optimizer"], *_ = args
        losses, skipped, *_ = result
        record.iterations.append(_exact({**losses, "grad norm": result[5], "skipped": skipped}))

    def note_evaluation(result: Any, *args: Any, **kwargs: Any) -> None:
        trained["model"] = evaluation.bind(*args, **kwargs).arguments["model"]
        record.evaluations.append(_exact(result[0]))

    watch(stepping, "train_step", after=note_step)
    watch(evaluating, "evaluate", after=note_evaluation)
    main()
    for number, chunk in enumerate(trained["model"]):
        module = unwrap_model(chunk)
        for name, parameter in module.named_parameters():
            digest = _digest(parameter)
            record.parameters[f"chunk {number} {name}"] = digest
            record.layers[_in_whole_model(name, module)] = digest
    if "optimizer" in trained:  # there is none where nothing is trained
        record.optimizer.update(_optimizer_state(trained["optimizer"]))
    return record


def watch(
    owner: Any,
    name: str,
    before: Callable[..., object] | None = None,
    *,
    after: Callable[..., object] | None = None,
) -> None:
    """Watch a function of a module or class from now on, for as long as this rank lives.

    Args:
        owner: the module or class.
        name: the function's.
        before: is called with the arguments before each call.
        after: is called with the result and the arguments behind it.
    """
    upstream = getattr(owner, name)

    @functools.wraps(upstream)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args, **kwargs)
        result = upstream(*args, **kwargs)
        if after is not None:
            after(result, *args, **kwargs)
        return result

    setattr(owner, name, watched)


def heard(logger: str = "", level: int = logging.INFO) -> list[str]:
    """Return a list that takes what a logger of this rank says from now on; "" is every logger."""
    said: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    listened = logging.getLogger(logger)
    if logger:
        listened.setLevel(level)
    listened.addHandler(handler)
    return said


class FinishedSearch:
    """A `SearchProcess` that searches while it is made, in the rank's own process."""

    def __init__(self, **question: Any) -> None:
        from megatron.fold3d.predict.search.measured_search import predictions

        self._found = predictions(**question)

    def answer(self) -> Predictions:
        return self._found

    def close(self) -> None:
        pass


def differences(ours: Sequence[Record], stock: Sequence[Record]) -> list[str]:
    """Name each value of any rank that is not the same in both runs."""
    return [
        f"rank {rank}: {name}: {mine.get(name)} instead of {theirs.get(name)}"
        for rank, (a, b) in enumerate(zip(ours, stock, strict=True))
        for mine, theirs in [(_flat(a), _flat(b))]
        for name in sorted(mine.keys() | theirs.keys())
        if mine.get(name) != theirs.get(name)
    ]


def as_known(ours: Sequence[Record], stock: Sequence[Record]) -> list[Record]:
    """Drop from stock's records the norms that ours did not know when the iteration ended."""
    return [
        replace(
            theirs,
            iterations=[
                {name: value for name, value in row.items() if name != "grad norm" or name in own}
                for row, own in zip(theirs.iterations, mine.iterations, strict=True)
            ],
        )
        for mine, theirs in zip(ours, stock, strict=True)
    ]


def since(iteration: int, whole: Sequence[Record], evaluations: int = 0) -> list[Record]:
    """Return runs without their first iterations, and without so many evaluations."""
    return [
        replace(
            record,
            iterations=record.iterations[iteration:],
            evaluations=record.evaluations[evaluations:],
        )
        for record in whole
    ]


def check_losses(ours: Sequence[Record], stock: Sequence[Record]) -> None:
    """Check that losses are stock's but for rounding: fp32 keeps seven digits."""
    mine, theirs = (
        [[float.fromhex(row["lm loss"]) for row in record.iterations] for record in records]
        for records in (ours, stock)
    )
    assert mine == [pytest.approx(losses, rel=1e-6) for losses in theirs]


def merged(records: Sequence[Record]) -> dict[str, Any]:
    """What does not depend on which rank and chunk hold a layer: losses, and layers themselves."""
    losses = [
        {name: value for name, value in row.items() if name.endswith("loss")}
        for row in (*records[-1].iterations, *records[-1].evaluations)
    ]
    layers: dict[str, str] = {}
    for record in records:
        layers |= record.layers
    return {"losses": losses, **layers}


def _in_whole_model(name: str, module: Any) -> str:
    """Return a parameter's name with its layer's number in the model, not in the chunk."""
    if found := re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name):
        return f"layer {module.decoder.layers[int(found[1])].layer_number} {found[2]}"
    return name


def _flat(record: Record) -> dict[str, str]:
    flat = {f"parameter {name}": digest for name, digest in record.parameters.items()}
    flat |= {f"optimizer {name}": digest for name, digest in record.optimizer.items()}
    for kind, rows in (("iteration", record.iterations), ("evaluation", record.evaluations)):
        for number, row in enumerate(rows, 1):
            flat |= {f"{kind} {number} {name}": value for name, value in row.items()}
    return flat


def _exact(values: dict[str, Any]) -> dict[str, str]:
    return {name: float(value).hex() for name, value in values.items() if value is not None}


def _digest(tensor: torch.Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(raw).hexdigest()[:16]}"


def _optimizer_state(optimizer: Any) -> Iterator[tuple[str, str]]:
    for part, megatrons in enumerate(optimizer.chained_optimizers):
        groups = megatrons.optimizer.param_groups if megatrons.optimizer else ()  # all are frozen
        for group, settings in enumerate(groups):
            for number, parameter in enumerate(settings["params"]):
                name = f"{part}.{group}.{number}"
                yield f"{name} parameter", _digest(parameter)
                state = megatrons.optimizer.state[parameter]
                tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
                # Of a parameter that no step has updated, a checkpoint brings back zeros for none.
                if any(value.any() for value in tensors.values()):
                    for key, value in tensors.items():
                        yield f"{name} {key}", _digest(value)
        yield f"{part} loss scale", float(megatrons.get_loss_scale()).hex()
