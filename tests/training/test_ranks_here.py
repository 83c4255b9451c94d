"""Which pipeline ranks a node holds, under each of Megatron's orders of ranks."""

from argparse import Namespace

import pytest

from megatron.fold3d.training.launch import _ranks_here


@pytest.mark.parametrize(
    ("use_tp_pp_dp_mapping", "expected"),
    [(False, [2, 2, 2, 2]), (True, [0, 0, 1, 1])],  # of 16 ranks: tp=2, dp=2, pp=4
)
def test_a_nodes_pipeline_ranks_follow_the_order_of_ranks(
    monkeypatch: pytest.MonkeyPatch, use_tp_pp_dp_mapping: bool, expected: list[int]
):
    for name, value in (("RANK", "9"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    args = Namespace(
        world_size=16,
        pipeline_model_parallel_size=4,
        tensor_model_parallel_size=2,
        context_parallel_size=1,
        use_tp_pp_dp_mapping=use_tp_pp_dp_mapping,
    )
    assert _ranks_here(args) == expected
