"""What ``--hierarchical-dp-sync`` accepts and refuses."""

from argparse import ArgumentParser

import pytest

from megatron.fold3d.config.fold3d_config import Fold3DConfig

ON = "--num-layers 8 --pipeline-model-parallel-size 2 --hierarchical-dp-sync auto"
AIAO = f"{ON} --schedule aiao --overlap-grad-reduce --device cpu"


def config(parser: ArgumentParser, line: str) -> Fold3DConfig:
    return Fold3DConfig.from_args(parser.parse_args(line.split()))


@pytest.mark.parametrize(
    "more",
    [
        "",
        "--backward-share 0.5",
        "--dp-slices on",
        "--delay-weight-grads 0",
        "--use-distributed-optimizer --overlap-param-gather",
    ],
)
def test_sums_inside_nodes_are_taken_with_all_that_reduces_by_segment(
    parser: ArgumentParser, more: str
) -> None:
    assert config(parser, f"{AIAO} {more}").hierarchical_dp_sync
    assert not config(parser, f"{AIAO} {more} --hierarchical-dp-sync off").hierarchical_dp_sync


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (
            f"{ON} --schedule stock --device cpu",
            "--hierarchical-dp-sync auto with --schedule stock: only our executor leads reductions "
            "through nodes; drop it, or give --schedule aiao",
        ),
        (
            f"{AIAO} --preemptive-comm",
            "--preemptive-comm with --hierarchical-dp-sync auto: its scheduler starts slices in "
            "one group of ranks, and these are three; drop one of the two",
        ),
    ],
)
def test_what_cannot_sum_inside_nodes_is_refused(
    parser: ArgumentParser, line: str, problem: str
) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011  # the whole text is compared
        config(parser, line)
    assert str(refused.value) == problem


@pytest.mark.parametrize(("connections", "found"), [("1", "=1"), ("8", "=8"), (None, ", unset")])
def test_a_gpu_needs_a_hardware_queue_for_each_stream(
    parser: ArgumentParser,
    monkeypatch: pytest.MonkeyPatch,
    connections: str | None,
    found: str,
) -> None:
    on_gpus = AIAO.replace("--device cpu", "")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    assert config(parser, on_gpus).hierarchical_dp_sync
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    if connections is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    with pytest.raises(ValueError, match=f"^CUDA_DEVICE_MAX_CONNECTIONS{found}.*give 32"):
        config(parser, on_gpus)
