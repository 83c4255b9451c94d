"""What a script hands to ``pretrain`` is refused where ranks would wait for ever, not elsewhere."""

from types import SimpleNamespace

import pytest

from megatron.fold3d.runtime.executor import script_problems

SIZES = {
    f"{name}_parallel_size": 1
    for name in ("pipeline_model", "tensor_model", "context", "expert_model")
}
CONFIG = {
    "variable_seq_lengths": False,
    "num_microbatches_with_partial_activation_checkpoints": None,
}


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"variable_seq_lengths": True}, "variable_seq_lengths: "),
        ({"num_microbatches_with_partial_activation_checkpoints": 1}, "num_microbatches_with"),
        (
            {"pipeline_model_parallel_size": 2, "context_parallel_size": 4},
            "process_non_loss_data_func with --pipeline-model-parallel-size 2 "
            "--context-parallel-size 4: ",
        ),
    ],
)
def test_what_a_plan_cannot_run_is_named(settings: dict[str, object], found: str) -> None:
    (problem,) = script_problems(SimpleNamespace(**CONFIG | SIZES | settings), print)
    assert problem.startswith(found)


def test_one_rank_evaluates_alone() -> None:
    config = SimpleNamespace(**CONFIG | SIZES)
    assert [*script_problems(config, print)] == []
    config.pipeline_model_parallel_size = 2
    assert [*script_problems(config)] == []
