"""Pairs of micro-batches with experts on several ranks train what stock trains, bit for bit."""

import functools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from tests.distributed import RankError, run_distributed
from tests.end_to_end.test_equal_to_stock import FULL, OVERLAP, PAIRS
from tests.end_to_end.training import (
    TINY,
    Record,
    _digest,
    _exact,
    as_known,
    differences,
    marked,
    train,
)

pytestmark = pytest.mark.gloo

MODEL = (
    f"{TINY} --lr 1e-2 --eval-iters 1 --eval-interval 3 --train-iters 4 --lr-decay-iters 10 "
    "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --num-experts 4 "
    "--moe-token-dispatcher-type alltoall --disable-bias-linear"
)
AUX = "--moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01"
BIAS = (
    "--moe-router-topk 2 --moe-router-enable-expert-bias --moe-router-score-function sigmoid "
    "--moe-router-load-balancing-type none"
)
OUTPUTS = "--recompute-granularity selective --recompute-modules layernorm"
ENGINE = "--transformer-impl transformer_engine --moe-grouped-gemm"
SHARED = "--moe-shared-expert-intermediate-size 64"
AIAO = f"--segments 2 --schedule aiao{PAIRS}"
ONE = f"--segments 1 --schedule 1f1b{PAIRS}"
INTERLEAVED = f"--segments 2 --schedule interleaved{PAIRS}"


@dataclass(frozen=True, slots=True)
class Row:
    """One run, of two pipeline ranks and two or more that share the experts.

    Attributes:
        flags: of the experts.
        ours: segments and schedule.
        tp: tensor-parallel ranks.
        dp: replicas.
        m: micro-batches; stock's interleaved order takes them as one group.
        repeats: whether other rows show what it does; then `make stress` alone runs it.
    """

    flags: str
    ours: str = AIAO
    tp: int = 1
    dp: int = 2
    m: int = 4
    repeats: bool = False

    @property
    def num_ranks(self) -> int:
        """The number of processes."""
        return 2 * self.tp * self.dp

    def command(self, ours: str) -> tuple[str, ...]:
        """Return the flags of a run."""
        tensors = f"--tensor-model-parallel-size {self.tp}"
        if self.tp > 1:
            tensors += " --sequence-parallel"
        tensors += f" --num-layers {4 if '--segments 1' in self.ours else 8}"
        line = f"{MODEL} {tensors} --global-batch-size {self.dp * self.m} {self.flags} {ours}"
        return tuple(shlex.split(line))

    @property
    def stock(self) -> str:
        """The flags of stock's run."""
        group = f"--microbatch-group-size-per-virtual-pipeline-stage {self.m}"
        segments = self.ours.partition(" --schedule")[0]
        return f"{segments} --schedule stock {group if self.m % 2 and '2' in segments else ''}"


ROWS = (
    Row(BIAS, ours=INTERLEAVED),
    Row(AUX.replace("aux_loss", "global_aux_loss", 1), ours=ONE),
    Row(AUX.replace("aux_loss", "seq_aux_loss", 1) + " --moe-z-loss-coeff 0.001", repeats=True),
    Row(f"{AUX} {SHARED} --moe-shared-expert-overlap", repeats=True),
    Row(f"{AUX} --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity", repeats=True),
    # Outputs that are computed again; modules that stand in for Transformer Engine's.
    Row(f"{AUX} {OUTPUTS} --expert-tensor-parallel-size 1", tp=2, dp=1, m=2),
    Row(
        f"{AUX} {OUTPUTS} moe_act {SHARED} {ENGINE} --overlap-grad-reduce",
        ours=f"{AIAO}:wgrad=last@1",
    ),
    # Carried steps, copies to the host and split backwards beside pairs.
    Row(f"{AUX} {OVERLAP} --clip-grad 9", ours=f"--segments 4 --schedule aiao{PAIRS}:step=next"),
    Row(
        f"{AUX} {FULL} uniform --overlap-grad-reduce",
        ours=f"{AIAO}:step=next:share=1 --offload-activations on",
    ),
)


@pytest.mark.parametrize("row", marked(ROWS), ids=str)
def test_losses_norms_parameters_and_biases_are_those_of_stock(row: Row) -> None:
    ours = run_distributed(trained, row.num_ranks, row.command(row.ours))
    stock = run_distributed(trained, row.num_ranks, row.command(row.stock))
    assert differences(ours, as_known(ours, stock)) == []
    assert len(stock[0].iterations) == 4


def test_a_dispatcher_that_both_micro_batches_share_is_found() -> None:
    row = Row(AUX)
    try:
        ours = run_distributed(trained_with_one_dispatcher, row.num_ranks, row.command(row.ours))
    except RankError:
        return
    stock = run_distributed(trained, row.num_ranks, row.command(row.stock))
    assert differences(ours, stock) != []


def trained_with_one_dispatcher(argv: Sequence[str]) -> Record:
    """Train with the notes of both micro-batches in one place."""
    from megatron.fold3d.runtime.tensor_parallel import paired_experts

    paired_experts.copy = SimpleNamespace(copy=lambda one: one)
    return trained(argv)


def trained(argv: Sequence[str]) -> Record:
    """Train, and record what only experts have: their losses, biases and counts."""
    if not {"transformer_engine", "--recompute-modules"} & {*argv}:
        return _trained(argv)
    from tests.runtime.weight_grads import engine

    with engine.installed():
        return _trained(argv)


def _trained(argv: Sequence[str]) -> Record:
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    from megatron.core.utils import unwrap_model
    from megatron.training import training

    train_step = training.train_step
    losses: list[dict[str, str]] = []
    models: list[Any] = []

    @functools.wraps(train_step)
    def step(*args: Any, **kwargs: Any) -> Any:
        models[:] = args[2]
        result = train_step(*args, **kwargs)
        row = {}
        for name, entry in get_moe_metrics_tracker().metrics.items():
            row |= {f"{name} {i}": v for i, v in enumerate(entry.values.tolist())}
        losses.append(_exact(row))
        return result

    training.train_step = step
    record = train(argv)
    for row, more in zip(record.iterations, losses, strict=True):
        row |= more
    for number, chunk in enumerate(models):
        for name, buffer in unwrap_model(chunk).named_buffers():
            record.parameters[f"chunk {number} buffer {name}"] = _digest(buffer)
    return record
