"""What every test shares: a header naming the hardware, and the rule that skips `gpu` tests."""

import os

import pytest
import torch


def pytest_report_header() -> str:
    if torch.cuda.is_available():
        gpus = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    else:
        gpus = "no CUDA GPU, tests marked gpu are skipped"
    return f"hardware: {len(os.sched_getaffinity(0))} CPU cores, {gpus}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU, and torch sees none")
