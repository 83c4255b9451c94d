"""TensorBoard and W&B get what stock Megatron writes, of the same iterations."""

from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from tests.distributed import run_distributed
from tests.end_to_end.test_equal_to_stock import Row
from tests.end_to_end.training import train

pytestmark = pytest.mark.gloo

Values = dict[tuple[str, int], list[float]]  # by name and step

WRITTEN = "--tensorboard-log-interval 1"
DEFERRED = f"--overlap-grad-reduce {WRITTEN}"
FP16 = "--fp16 --initial-loss-scale 524288 --hysteresis 1"
LATER = "1f1b:step=next:share=0.5"
UNCLIPPED = f"{DEFERRED} --clip-grad 0"
ROWS = (
    Row("aiao", f"{WRITTEN} --log-params-norm --log-num-zeros-in-grad", segments=1),
    Row("aiao:step=next:share=0.5", f"{DEFERRED} {FP16}", segments=1),
    Row(LATER, f"{UNCLIPPED} --eval-iters 0 --tensorboard-log-interval 2", pp=1, dp=2, segments=1),
    Row(LATER, f"{UNCLIPPED} --exit-interval 2", pp=1, dp=2, segments=1),
)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_what_is_written_is_what_stock_writes(row: Row) -> None:
    ours, stock = (
        run_distributed(written, row.num_ranks, row.command(schedule))[-1]
        for schedule in (row.ours, "--schedule stock")
    )
    for mine, theirs in zip(ours, stock, strict=True):  # TensorBoard, W&B
        assert [step for name, step in theirs if name == "grad-norm"]
        assert mine.keys() == theirs.keys()
        for (name, step), value in theirs.items():
            # Norms of segments are summed one by one, and fp32 keeps seven digits.
            tolerance = 1e-5 if name.startswith("grad-norm") else 0
            assert mine[name, step] == pytest.approx(value, rel=tolerance, abs=0), (name, step)


class TensorBoard:
    def __init__(self) -> None:
        self.values: Values = {}

    def add_scalar(self, name: str, value: Any, step: int) -> None:
        self.values.setdefault((name, step), []).append(float(value))

    def add_text(self, *_: Any, **__: Any) -> None:
        pass

    def flush(self) -> None:
        pass


class Wandb:
    def __init__(self) -> None:
        self.run: SimpleNamespace | None = SimpleNamespace(step=0)
        self.config: dict[str, Any] = {}
        self.values: Values = {}

    def log(self, values: dict[str, Any], step: int) -> None:
        assert self.run is not None, "the run is finished"
        assert step >= self.run.step, "W&B drops it"
        self.run.step = step
        for name, value in values.items():
            self.values.setdefault((name, step), []).append(float(value))

    def finish(self) -> None:
        self.run = None


def written(argv: Sequence[str]) -> tuple[Values, Values]:
    """Train; with what the last rank's writers got, which is all."""
    from megatron.training import global_vars

    tensorboard, wandb = TensorBoard(), Wandb()

    def set_tensorboard(args: Any) -> None:
        if args.rank == args.world_size - 1:
            global_vars._GLOBAL_TENSORBOARD_WRITER = tensorboard

    def set_wandb(args: Any) -> None:
        if args.rank == args.world_size - 1:
            global_vars._GLOBAL_WANDB_WRITER = wandb

    global_vars._set_tensorboard_writer = set_tensorboard
    global_vars._set_wandb_writer = set_wandb
    with suppress(SystemExit):  # Megatron's way to end early
        train(argv)
    return tensorboard.values, wandb.values
