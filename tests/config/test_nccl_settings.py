"""Settings of NCCL and CUDA that would hang a run, or undo a flag, are refused by name."""

import pytest

MORE = "--schedule aiao"
PREEMPTS = "--preemptive-comm"


@pytest.mark.parametrize(
    ("setting", "flags"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS=1", PREEMPTS),
        ("CUDA_DEVICE_MAX_CONNECTIONS=8", PREEMPTS),
        ("NCCL_LAUNCH_ORDER_IMPLICIT=1", PREEMPTS),
        ("NCCL_IB_SL=106", "--traffic-class pp=1,dp=0"),
        ("NCCL_IB_TC=106", "--traffic-class pp=1,dp=0"),
    ],
)
def test_what_may_hang_preemption_or_overrides_traffic_classes_is_refused_on_gpus(
    config, problem, monkeypatch, setting, flags
):
    monkeypatch.setenv(*setting.split("="))
    assert problem(flags).startswith(f"{setting} with {flags}: ")
    for harmless in ("", f"{PREEMPTS} --device cpu"):
        config(harmless)


@pytest.mark.parametrize("setting", ["CUDA_DEVICE_MAX_CONNECTIONS=32", "CUDA_LAUNCH_BLOCKING=0"])
def test_environment_variables_that_do_not_hang_preemption_are_accepted(
    config, monkeypatch, setting
):
    monkeypatch.setenv(*setting.split("="))
    config(PREEMPTS)


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        ("pp=3 --device cpu", " with --device cpu: gloo does not mark its packets; drop"),
        ("dp=3 --device cpu", " with --device cpu: gloo does not mark its packets; drop"),
        ("pp=3,dp=0 --device cpu", " with --device cpu: gloo does not mark its packets; drop"),
        ("pp=256", ": 256 is no class, which is a number from 0 to 255"),
    ],
)
def test_traffic_classes_are_of_networks_that_mark_packets_and_fit_in_a_byte(problem, flags, rule):
    classes = flags.split()[0]
    assert problem(f"--traffic-class {flags}").startswith(f"--traffic-class {classes}{rule}")


@pytest.mark.parametrize("classes", ["3", "pp=x", "tp=3", "pp=1,pp=2", "pp=-1"])
def test_what_is_no_pair_of_classes_is_refused(parse, capsys, classes: str):
    with pytest.raises(SystemExit):
        parse(f"--traffic-class {classes}")
    assert "a class is a number for pp, dp or both; give pp=N,dp=N" in capsys.readouterr().err
