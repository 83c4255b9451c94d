"""Settings of NCCL and CUDA that would hang a run, or undo a flag, are refused by name."""

from argparse import ArgumentParser

import pytest

from megatron.fold3d.config.read_config import read_config

NEEDED = "--pipeline-model-parallel-size 2 --num-layers 8 --schedule aiao"
PREEMPTS = f"{NEEDED} --preemptive-comm"


def problem(parser: ArgumentParser, flags: str) -> str:
    with pytest.raises(ValueError, match="-") as caught:
        read_config(parser.parse_args(f"{NEEDED} {flags}".split()))
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
        read_config(parser.parse_args(harmless.split()))


@pytest.mark.parametrize(
    ("setting", "value"), [("CUDA_DEVICE_MAX_CONNECTIONS", "32"), ("CUDA_LAUNCH_BLOCKING", "0")]
)
def test_environment_variables_that_do_not_hang_preemption_are_accepted(
    parser: ArgumentParser, monkeypatch: pytest.MonkeyPatch, setting: str, value: str
) -> None:
    monkeypatch.setenv(setting, value)
    read_config(parser.parse_args(PREEMPTS.split()))


def test_traffic_classes_reach_the_configuration(parser: ArgumentParser) -> None:
    args = parser.parse_args([*NEEDED.split(), "--traffic-class", "pp=184"])
    config = read_config(args)
    assert config.traffic_class == {"pp": 184}


@pytest.mark.parametrize("classes", ["pp=3", "dp=3", "pp=3,dp=0"])
def test_traffic_classes_are_refused_over_gloo(parser: ArgumentParser, classes: str) -> None:
    message = problem(parser, f"--traffic-class {classes} --device cpu")
    assert message.startswith(
        f"--traffic-class {classes} with --device cpu: gloo does not mark its packets; drop"
    )


def test_traffic_class_must_fit_in_a_byte(parser: ArgumentParser) -> None:
    assert problem(parser, "--traffic-class pp=256").startswith(
        "--traffic-class pp=256: 256 is no class, which is a number from 0 to 255"
    )


@pytest.mark.parametrize("classes", ["3", "pp=x", "tp=3", "pp=1,pp=2", "pp=-1"])
def test_what_is_no_pair_of_classes_is_refused(
    parser: ArgumentParser, capsys: pytest.CaptureFixture[str], classes: str
) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args([*NEEDED.split(), "--traffic-class", classes])
    assert "a class is a number for pp, dp or both; give pp=N,dp=N" in capsys.readouterr().err


@pytest.mark.parametrize("setting", ["NCCL_IB_SL", "NCCL_IB_TC"])
def test_nccl_variables_that_override_traffic_classes_are_refused(
    parser: ArgumentParser, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    monkeypatch.setenv(setting, "106")
    message = problem(parser, "--traffic-class pp=1,dp=0")
    assert message.startswith(f"{setting}=106 with --traffic-class pp=1,dp=0: ")
