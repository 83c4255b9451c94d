"""What a run on GPUs lacks is found before it begins, or done without."""

import re
from argparse import ArgumentParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.fold3d.config import gpu_settings
from megatron.fold3d.config.gpu_settings import default_flags, gpu_problems
from megatron.fold3d.training import launch

AIAO = "--schedule aiao --pipeline-model-parallel-size 2"


def problems(parser: ArgumentParser, flags: str, schedule: str = "aiao") -> list[str]:
    return [*gpu_problems(parser.parse_args(flags.split()), schedule)]


def test_gradients_are_accumulated_without_apex_where_there_is_none(monkeypatch):
    assert default_flags() == ("--no-gradient-accumulation-fusion",)
    for there in (gpu_settings.FUSION_KERNEL, "transformer_engine"):
        monkeypatch.setattr(
            gpu_settings, "find_spec", lambda name, there=there: name == there or None
        )
        assert default_flags() == ()


@pytest.mark.parametrize(
    "setting",
    [
        "CUDA_LAUNCH_BLOCKING=1",
        "TORCH_NCCL_BLOCKING_WAIT=true",
        "NCCL_BLOCKING_WAIT=1",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL",
        "PYTORCH_NO_CUDA_MEMORY_CACHING=0",  # torch looks whether it is there
    ],
)
def test_what_blocks_or_hangs_every_plan_is_refused(parser, monkeypatch, setting):
    monkeypatch.setenv(*setting.split("="))
    (message,) = problems(parser, AIAO)
    assert message.startswith(f"{setting}: ")
    assert "; unset it, or use --schedule stock" in message
    assert problems(parser, f"{AIAO} --device cpu") == problems(parser, "", "stock") == []


def test_debug_levels_and_settings_that_are_off_block_nothing(parser, monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "INFO")
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")
    assert problems(parser, AIAO) == []


def test_timers_that_wait_for_the_device_in_each_computation_of_a_pipeline_are_refused(parser):
    (message,) = problems(parser, f"{AIAO} --timing-log-level 2")
    assert message.startswith("--timing-log-level 2: ")
    assert problems(parser, f"{AIAO} --timing-log-level 1") == []
    assert problems(parser, f"{AIAO} --timing-log-level 2 --device cpu") == []
    assert problems(parser, "--schedule aiao --timing-log-level 2") == []  # it receives nothing


@pytest.mark.parametrize("name", ["TORCH_NCCL_ENABLE_TIMING", "TORCH_NCCL_DESYNC_DEBUG"])
def test_collectives_with_timed_events_are_refused_with_one_queue(parser, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert problems(parser, AIAO) == []
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    (message,) = problems(parser, AIAO)
    assert message.startswith(f"{name}=1: with CUDA_DEVICE_MAX_CONNECTIONS=1: ")


@pytest.mark.parametrize(
    ("flags", "major", "groups"),
    [
        ("", 8, ["tp"]),
        ("--high-priority-stream-groups pp dp", 9, ["pp", "dp"]),
        ("", 10, []),  # Blackwell
    ],
)
def test_with_many_queues_tensor_parallel_streams_get_priority_and_the_log_says_what_is_lost(
    parser: ArgumentParser,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    flags: str,
    major: int,
    groups: list[str],
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(major=major))
    args = parser.parse_args(f"--tensor-model-parallel-size 2 {flags}".split())
    with caplog.at_level("INFO"):
        launch._put_tensor_parallel_first(args)
    assert args.high_priority_stream_groups == groups
    said = f"may start behind the weight gradient that would hide it, .*: {' '.join(groups)}$"
    assert [bool(re.search(said, text)) for text in caplog.messages] == [True] * bool(groups)


def test_training_asks_before_process_groups_exist(parser, monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    args = parser.parse_args(AIAO.split())
    with pytest.raises(ValueError, match=r"(?m)^CUDA_LAUNCH_BLOCKING=1: "):
        launch.check(args)


@pytest.mark.parametrize("flag", ["--offload-activations on", "--lazy-inter-segment"])
def test_a_missing_offload_library_is_found_before_the_run(parser, monkeypatch, tmp_path, flag):
    monkeypatch.setattr(gpu_settings, "OFFLOAD_LIBRARY", tmp_path / "offload.cuda.so")
    (message,) = problems(parser, f"{AIAO} {flag}")
    assert message.startswith(f"{flag} without {tmp_path / 'offload.cuda.so'}: ")
    assert message.endswith("; run: make build-cuda")
    (tmp_path / "offload.cuda.so").touch()
    assert problems(parser, f"{AIAO} {flag}") == []


@pytest.mark.parametrize(("device", "build"), [("cpu", "extension"), ("cuda", "build-cuda")])
def test_a_missing_coder_is_found_before_the_run(parser, monkeypatch, tmp_path, device, build):
    monkeypatch.setitem(gpu_settings.DELTA_LIBRARIES, device, tmp_path / "_delta_code.so")
    flags = f"{AIAO} --device {device} --delta-param-gather"
    (message,) = gpu_settings.delta_library_problems(parser.parse_args(f"{flags} on".split()))
    assert message.endswith(f"; run: make {build}")
    (tmp_path / "_delta_code.so").touch()
    for value in ("on", "auto"):
        args = parser.parse_args(f"{flags} {value}".split())
        assert [*gpu_settings.delta_library_problems(args)] == []


def test_lazy_transfers_between_nodes_ask_for_the_network_that_they_take(parser, monkeypatch):
    monkeypatch.setattr(gpu_settings, "OFFLOAD_LIBRARY", Path(__file__))
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "16")
    lazy = f"{AIAO} --lazy-inter-segment"
    assert problems(parser, lazy) == []  # on one node, as far as is known
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    (message,) = problems(parser, lazy)
    assert message.startswith("--lazy-inter-segment on several nodes without GLOO_SOCKET_IFNAME: ")
    assert problems(parser, AIAO) == problems(parser, f"{lazy} --device cpu") == []
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert problems(parser, lazy) == []


def test_the_offload_library_is_looked_for_where_it_is_built() -> None:
    from megatron.fold3d.runtime.offload.offload_library import LIBRARY

    assert gpu_settings.OFFLOAD_LIBRARY == LIBRARY


def test_preemption_asks_for_more_queues_than_cudas_default(parser, monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    (message,) = problems(parser, f"{AIAO} --preemptive-comm")
    assert message.startswith("CUDA_DEVICE_MAX_CONNECTIONS, unset and so 8, with --preemptive-comm")
    assert "; give 32, " in message
    assert "; with 1, slices=on starts slices where " in message
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    assert problems(parser, f"{AIAO} --preemptive-comm") == []
