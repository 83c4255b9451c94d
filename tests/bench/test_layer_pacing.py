"""Delayed weight gradients last as long as a forward, in whole and in parts."""

import shlex
from pathlib import Path

import pytest

from megatron.fold3d.observe.trace_files import read_ranks
from scripts.bench import layer_pacing
from tests.distributed import run_distributed
from tests.end_to_end.test_trace import MODEL, SIZES
from tests.end_to_end.training import train

FORWARD_S, BACKWARD_S = 0.02, 0.05


@pytest.mark.gloo
@pytest.mark.parametrize("model", [f"{SIZES} --global-batch-size 8", MODEL])
def test_weight_gradients_take_their_time_in_whole_and_in_parts(model: str, tmp_path: Path) -> None:
    flags = f"{model} --schedule aiao:wgrad=last@1 --train-iters 4"
    flags += f" --trace {tmp_path} --trace-iterations 3"
    run_distributed(_train_paced, 4, shlex.split(flags))
    for rank in read_ranks(tmp_path):
        (row,) = rank.iterations
        split_stage = rank.pp_rank + 2  # of two layers
        seconds: dict[str, list[float]] = {}
        for event in row.events:
            kind = event.name.strip("0123456789:")
            if event.kind == "compute" and event.name.startswith(f"{split_stage}{kind}"):
                seconds.setdefault(kind, []).append(event.end_s - event.start_s)
        in_parts = any("W:" in event.name for event in row.events)
        assert in_parts == (model == MODEL)
        assert sum(seconds["W"]) >= 0.999 * 2 * FORWARD_S * rank.num_microbatches
        assert min(seconds["B"]) >= 0.999 * 2 * (BACKWARD_S - FORWARD_S)


def _train_paced(argv: list[str]) -> None:
    from fold3d_patches import registry

    with registry.apply(layer_pacing.patches(FORWARD_S, BACKWARD_S)):
        train(argv)
