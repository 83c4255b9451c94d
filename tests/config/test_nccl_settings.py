"""Settings of NCCL and CUDA that would hang a run, or undo a flag, are refused by name."""

from argparse import ArgumentParser

import pytest

from megatron.fold3d.config.fold3d_config import Fold3DConfig

NEEDED = "--pipeline-model-parallel-size 2 --num-layers 8 --schedule aiao"
PREEMPTS = f"{NEEDED} --preemptive-comm"


def problem(parser: ArgumentParser, flags: str) -> str:
    with pytest.raises(ValueError, match="-") as caught:
        Fold3DConfig.from_args(parser.parse_args(f"{NEEDED} {flags}".split()))
    assert str(caught.value).count("\n") == 0
    return str(caught.value)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "8"),
        ("NCCL_LAUNCH_ORDER_IMPLICIT", "1"),
    ],
)
def test_what_may_hang_preemption_is_refused_on_gpus(
    parser: ArgumentParser, monkeypatch: pytest.MonkeyPatch, setting: str, value: str
) -> None:
    monkeypatch.setenv(setting, value)
    found = f"{setting}={value} with --preemptive-comm: "
    assert problem(parser, "--preemptive-comm").startswith(found)
    for harmless in (NEEDED, f"{PREEMPTS} --device cpu"):
        Fold3DConfig.from_args(parser.parse_args(harmless.split()))


@pytest.mark.parametrize(
    ("setting", "value"), [("CUDA_DEVICE_MAX_CONNECTIONS", "32"), ("CUDA_LAUNCH_BLOCKING", "0")]
)
def test_environment_variables_that_do_not_hang_preemption_are_accepted(
    parser: ArgumentParser, monkeypatch: pytest.MonkeyPatch, setting: str, value: str
) -> None:
    monkeypatch.setenv(setting, value)
    Fold3DConfig.from_args(parser.parse_args(PREEMPTS.split()))


def test_traffic_classes_reach_the_configuration(parser: ArgumentParser) -> None:
    args = parser.parse_args([*NEEDED.split(), "--pp-traffic-class", "184"])
    config = Fold3DConfig.from_args(args)
    assert (config.pp_traffic_class, config.dp_traffic_class) == (184, None)


@pytest.mark.parametrize("flag", ["--pp-traffic-class", "--dp-traffic-class"])
def test_traffic_classes_are_refused_over_gloo(parser: ArgumentParser, flag: str) -> None:
    message = problem(parser, f"{flag} 3 --device cpu")
    assert message.startswith(f"{flag} with --device cpu: gloo does not mark its packets; drop")


def test_traffic_class_must_fit_in_a_byte(parser: ArgumentParser) -> None:
    assert problem(parser, "--pp-traffic-class 256").startswith(
        "--pp-traffic-class 256: a class is a number from 0 to 255"
    )


@pytest.mark.parametrize("setting", ["NCCL_IB_SL", "NCCL_IB_TC"])
def test_nccl_variables_that_override_traffic_classes_are_refused(
    parser: ArgumentParser, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    monkeypatch.setenv(setting, "106")
    message = problem(parser, "--pp-traffic-class 1 --dp-traffic-class 0")
    assert message.startswith(f"{setting}=106 with --pp-traffic-class and --dp-traffic-class: ")
