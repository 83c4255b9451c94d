"""What a rank's trace says beside its events."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.fold3d.observe.trace_files import read_ranks
from megatron.fold3d.runtime.trace import tracer
from megatron.fold3d.runtime.trace.metrics import Metrics
from megatron.fold3d.runtime.trace.tracer import Tracer
from tests.configs import CONFIG


def test_a_trace_has_the_number_of_microbatches_of_its_iterations_and_not_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    names = ("pipeline_model_parallel", "data_parallel", "tensor_model_parallel")
    ranks = {f"get_{name}_rank": lambda: 0 for name in (*names, "context_parallel")}
    here = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 1)
    monkeypatch.setattr(tracer, "parallel_state", SimpleNamespace(**ranks))
    monkeypatch.setattr(tracer, "dist", here)
    config = replace(CONFIG, trace=tmp_path, trace_iterations=range(2, 3))
    traced = Tracer(config, Metrics(lambda: None, lambda: None))
    for number, num_microbatches in ((1, 2), (2, 4), (3, 8)):  # --rampup-batch-size
        monkeypatch.setattr(tracer, "get_num_microbatches", lambda n=num_microbatches: n)
        with traced.iteration(number, []), traced.recorder.span("0F0", "compute"):
            pass
    (trace,) = read_ranks(tmp_path)
    assert ([row.iteration for row in trace.iterations], trace.num_microbatches) == ([2], 4)
