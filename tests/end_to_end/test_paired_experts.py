"""Pairs of micro-batches with experts on several ranks train what stock trains, bit for bit."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.distributed import RankError, run_distributed
from tests.end_to_end.test_equal_to_stock import ENGINE, FULL, OVERLAP, PAIRS, Row, check, stock_of
from tests.end_to_end.training import Record, _digest, _exact, differences, marked, train, watch

pytestmark = pytest.mark.gloo

MODEL = (
    "--expert-model-parallel-size 2 --num-experts 4 --moe-token-dispatcher-type alltoall "
    "--disable-bias-linear --num-layers 8"
)
AUX_LOSS = "--moe-router-topk 2 --moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type"
AUX = f"{MODEL} {AUX_LOSS} aux_loss"
BIAS = (
    f"{MODEL} --moe-router-topk 2 --moe-router-enable-expert-bias "
    "--moe-router-score-function sigmoid --moe-router-load-balancing-type none"
)
OUTPUTS = "--recompute-granularity selective --recompute-modules layernorm"
SHARED = "--moe-shared-expert-intermediate-size 64"
AIAO = f"aiao{PAIRS}"


def trained(argv: Sequence[str], _: Path | None = None) -> Record:
    """Train, and record what only experts have: their losses, biases and counts."""
    if not {"transformer_engine", "--recompute-modules"} & {*argv}:
        return _trained(argv)
    from tests.runtime.weight_grads import engine

    with engine.installed():
        return _trained(argv)


ROW = Row(AIAO, AUX, dp=2, trains=trained, reference=trained)
ROWS = (
    replace(ROW, word=f"interleaved{PAIRS}", flags=BIAS),
    replace(
        ROW,
        word=f"1f1b{PAIRS}",
        flags=f"{MODEL} {AUX_LOSS} global_aux_loss --num-layers 4",
        segments=1,
    ),
    replace(ROW, flags=f"{MODEL} {AUX_LOSS} seq_aux_loss --moe-z-loss-coeff 0.001", repeats=True),
    replace(ROW, flags=f"{AUX} {SHARED} --moe-shared-expert-overlap", repeats=True),
    replace(
        ROW,
        flags=f"{AUX} --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity",
        repeats=True,
    ),
    # Outputs that are computed again; modules that stand in for Transformer Engine's.
    replace(
        ROW,
        flags=f"{AUX} {OUTPUTS} --expert-tensor-parallel-size 1 --sequence-parallel",
        tp=2,
        dp=1,
        m=2,
    ),
    replace(
        ROW,
        word=f"{AIAO}:wgrad=last@1",
        flags=f"{AUX} {OUTPUTS} moe_act {SHARED} {ENGINE} --moe-grouped-gemm --overlap-grad-reduce",
    ),
    # Carried steps, copies to the host and split backwards beside pairs.
    replace(ROW, word=f"{AIAO}:step=next", flags=f"{AUX} {OVERLAP} --clip-grad 9", segments=4),
    replace(
        ROW,
        word=f"{AIAO}:step=next:share=1 --offload-activations on",
        flags=f"{AUX} {FULL} uniform --overlap-grad-reduce",
    ),
)


@pytest.mark.parametrize("row", marked(ROWS), ids=str)
def test_losses_norms_parameters_and_biases_are_those_of_stock(row: Row, tmp_path: Path) -> None:
    check(row, tmp_path)


def test_a_dispatcher_that_both_micro_batches_share_is_found() -> None:
    try:
        ours = run_distributed(trained_with_one_dispatcher, 4, ROW.command(ROW.ours))
    except RankError:
        return
    assert differences(ours, stock_of(ROW)) != []


def trained_with_one_dispatcher(argv: Sequence[str]) -> Record:
    """Train with the notes of both micro-batches in one place."""
    from megatron.fold3d.runtime.tensor_parallel import paired_experts

    paired_experts.copy = SimpleNamespace(copy=lambda one: one)
    return trained(argv)


def _trained(argv: Sequence[str]) -> Record:
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    from megatron.core.utils import unwrap_model
    from megatron.training import training

    losses: list[dict[str, str]] = []
    models: list[Any] = []

    def note(_: Any, *args: Any, **__: Any) -> None:
        models[:] = args[2]
        row = {}
        for name, entry in get_moe_metrics_tracker().metrics.items():
            row |= {f"{name} {i}": v for i, v in enumerate(entry.values.tolist())}
        losses.append(_exact(row))

    watch(training, "train_step", after=note)
    record = train(argv)
    for row, more in zip(record.iterations, losses, strict=True):
        row |= more
    for number, chunk in enumerate(models):
        for name, buffer in unwrap_model(chunk).named_buffers():
            record.parameters[f"chunk {number} buffer {name}"] = _digest(buffer)
    return record
