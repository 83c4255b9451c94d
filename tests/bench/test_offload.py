"""The bench of offloading compares what it says, and refuses what it cannot measure."""

import pytest
import torch

from scripts.bench.offload import WAYS, faster_than_training, main


@pytest.mark.slow
def test_one_rank_is_run_in_every_way(capsys: pytest.CaptureFixture[str]):
    sizes = "--hidden-size 32 --heads 2 --seq-length 8 --micro-batches 4 --iterations 1"
    sizes += " --tensor-parallel 2 --sequence-parallel"
    assert main(f"rank --device cpu --schedule afab {sizes}".split()) == 0
    out = capsys.readouterr().out
    rows = [line.split(" | ") for line in out.splitlines()[2:6]]
    assert [row[0].strip("| ") for row in rows] == list(WAYS)
    assert [row[3].strip("| ") for row in rows] == ["8", "3", "8", "4"]
    assert "1.000 of its high water; " in out
    assert "24 of 24 activations were back before they were needed; depth 1" in out
    assert "host memory: 1.000 of what the schedule holds (" in out
    assert "), 1.000 of equation 7" in out


def test_a_way_to_copy_that_is_faster_than_trainings_is_counted():
    on_an_h200 = [
        {"single": 42.0, "batched": 50.6, "kernel": 47.4},
        {"single": 50.1, "batched": 50.0, "kernel": 47.2},
    ]
    assert faster_than_training(on_an_h200) == 0
    old_driver = {"single": 42.0, "batched": 42.1, "kernel": 47.4}
    assert faster_than_training([*on_an_h200, old_driver]) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("command", "fix"), [("copies", "run it where there is one"), ("rank", "rank takes --device")]
)
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], command: str, fix: str):
    with pytest.raises(SystemExit, match="2"):
        main([command])
    assert f"torch finds no CUDA device, copies to a GPU need one; {fix}" in capsys.readouterr().err
