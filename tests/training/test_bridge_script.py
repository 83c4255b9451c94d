"""`bridge` on imitated modules of Megatron-Bridge, with Megatron's own configurations."""

import sys
from argparse import ArgumentParser
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from megatron.core.datasets.utils import compile_helpers
from megatron.core.pipeline_parallel import schedules

import megatron.fold3d as fold3d
from megatron.fold3d.runtime.executor import Executor
from megatron.fold3d.training import mistakes
from tests.config import test_bridge_config as configurations
from tests.config.conftest import MODEL
from tests.config.test_fold3d_config import validate

pytestmark = configurations.pytestmark

UPSTREAM = schedules.get_forward_backward_func


@pytest.fixture
def update(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Imitate Bridge; returns what its ``pretrain`` calls with the configuration."""

    def runtime_config_update(cfg: Any) -> None:
        cfg.data_parallel_size = 2

    def megatron_mimo_runtime_config_update(cfg: Any) -> None:
        raise AssertionError("it has no schedule of ours")

    names = {
        "config": (runtime_config_update, megatron_mimo_runtime_config_update),
        "initialize": (compile_helpers,),
        "pretrain": (runtime_config_update,),
        "train": (UPSTREAM,),
    }
    for name, functions in names.items():
        module = ModuleType(f"megatron.bridge.training.{name}")
        vars(module).update({function.__name__: function for function in functions})
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 4, "MASTER_ADDR": ""}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(mistakes, "PATIENCE_S", 0.0)
    pretrain = sys.modules["megatron.bridge.training.pretrain"]
    return lambda cfg: pretrain.runtime_config_update(cfg)


@pytest.fixture
def config(parser: ArgumentParser) -> Any:
    words = f"{MODEL} {configurations.MORE} {configurations.SHARDED} --global-batch-size 8"
    made = configurations.container(validate(parser.parse_args(words.split()), world_size=4))
    made.dist.use_decentralized_pg = False  # a field of Bridge's own
    return made


def scheduled() -> Any:
    found = sys.modules["megatron.bridge.training.train"].get_forward_backward_func
    return None if found is UPSTREAM else found()


def test_a_completed_configuration_gets_its_schedule(
    update: Callable[[Any], None], config: Any
) -> None:
    with fold3d.bridge(schedule="aiao", segments=2, device="cpu"):
        assert scheduled() is None
        update(config)
        first = scheduled()
        assert isinstance(first, Executor)
        assert config.model.virtual_pipeline_model_parallel_size == 2
        assert config.ddp.align_param_gather
        update(config)  # of a second ``pretrain``
        assert scheduled() not in (None, first)
    assert scheduled() is None


def test_without_a_schedule_bridge_trains_as_before(
    update: Callable[[Any], None], config: Any
) -> None:
    with fold3d.bridge(device="cpu"):
        update(config)
        assert scheduled() is None
        assert config.model.virtual_pipeline_model_parallel_size is None


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"schedule": "aio"}, "argument --schedule: 'aio' is no order"),
        ({"segment": 2}, "unrecognized arguments: --segment 2"),
        ({"lr": 1e-3}, "unrecognized arguments: --lr 0.001"),
        ({"segments": "auto"}, 'segments="auto": '),
        ({"model_preset": "gpt3-18b"}, "model_preset=: "),
        ({"check": ""}, "check=: "),
    ],
)
def test_a_mistake_in_a_flag_ends_the_script_in_one_line(
    update: Callable[[Any], None],
    capsys: pytest.CaptureFixture[str],
    flags: dict[str, Any],
    reason: str,
) -> None:
    with pytest.raises(SystemExit) as left:
        fold3d.bridge(**flags, device="cpu")
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"error: {reason}" in line


SEVERAL_MODULES = SimpleNamespace(use_dist_train=True)
FOUR_SEGMENTS = "--segments 2 with --num-virtual-stages-per-pipeline-rank 4: "


@pytest.mark.parametrize(
    ("part", "name", "value", "reason"),
    [
        ("model", "dist_train", SEVERAL_MODULES, "a model of several modules: "),
        ("dist", "use_decentralized_pg", True, "use_decentralized_pg: "),
        ("model", "virtual_pipeline_model_parallel_size", 4, FOUR_SEGMENTS),
        ("model", "cuda_graph_impl", "local", "--cuda-graph-impl local with --schedule aiao: "),
    ],
)
def test_a_configuration_that_cannot_work_ends_pretrain_in_one_line(
    update: Callable[[Any], None],
    config: Any,
    capsys: pytest.CaptureFixture[str],
    part: str,
    name: str,
    value: Any,
    reason: str,
) -> None:
    setattr(getattr(config, part), name, value)
    with fold3d.bridge(schedule="aiao", segments=2, device="cpu"):
        with pytest.raises(SystemExit):
            update(config)
        assert scheduled() is None
    (line,) = capsys.readouterr().err.splitlines()
    assert f"error: {reason}" in line
