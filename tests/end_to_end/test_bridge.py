"""Megatron-Bridge trains with our schedules what it trains with its own.

Its packages that are absent here, or need a GPU, are imitated: no call reaches them.
"""

import importlib.abc
import json
import runpy
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fold3d_patches import bridge_config, cpu
from fold3d_patches.registry import Patch, apply, around, replace
from tests.distributed import run_distributed
from tests.end_to_end.test_own_script import changed
from tests.end_to_end.training import Record, differences, recorded

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.skipif(
        find_spec("megatron.bridge") is None, reason="megatron-bridge is not installed"
    ),
]

SCRIPT = Path(__file__).with_name("bridge_llama.py")
IMITATED = (
    *("transformer_engine", "modelopt", "nvidia_resiliency_ext", "megatron.energon", "webdataset"),
    *("datasets", "diffusers", "hydra", "mlflow", "fla", "timm", "peft", "torchvision", "pyarrow"),
    "tensorboard",
)


Changes = dict[str, dict[str, Any]]

SHOWN = 'schedule="aiao", segments=2'
# On two ranks Megatron demands the overlap: without it, two transfers between them are mixed up.
TWO_CHUNKS: Changes = {
    "model": {
        "virtual_pipeline_model_parallel_size": 2,
        "overlap_p2p_comm": True,
        "batch_p2p_comm": False,
    }
}
SHARDED: Changes = {
    "ddp": dict.fromkeys(
        ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"), True
    )
}


@pytest.mark.parametrize(
    ("num_ranks", "flags", "changes"),
    [
        (2, SHOWN, {}),
        (4, f"{SHOWN}, trace=FOLDER", SHARDED),
        (4, 'schedule="auto", segments=2', {**SHARDED, "train": {"train_iters": 12}}),
        (4, SHOWN, {**SHARDED, "whole": {"mixed_precision": "bf16_mixed"}}),
    ],
)
def test_bridge_trains_what_it_trained(
    num_ranks: int, flags: str, changes: Changes, tmp_path: Path
) -> None:
    folder = tmp_path / "trace"
    script = _with(flags.replace("FOLDER", repr(str(folder))), tmp_path)
    ours = run_distributed(_train, num_ranks, script, changes)
    stock = run_distributed(_train, num_ranks, str(SCRIPT), TWO_CHUNKS | changes)

    assert len(ours[-1].iterations) >= 10
    assert ours[-1].iterations[0].keys() >= {"lm loss", "grad norm"}
    assert differences(ours, stock) == []
    assert folder.exists() == ("trace" in flags)
    assert len([*folder.glob("rank-*.json")]) == (num_ranks if "trace" in flags else 0)


def test_a_checkpoint_is_loaded_from_and_by_bridge(tmp_path: Path) -> None:
    scripts = {"ours": (_with(SHOWN, tmp_path), {}), "stock": (str(SCRIPT), TWO_CHUNKS)}
    loaded = {"ours": "stock", "stock": "ours"}
    records = {}
    for iterations, other in ((5, scripts), (10, loaded)):
        for name, (script, chunks) in scripts.items():
            folder = str(tmp_path / name)
            checkpoint = {"save": folder, "save_interval": 5}
            if other is loaded:
                checkpoint = {"load": str(tmp_path / loaded[name])}
            changes = {
                **SHARDED,
                "train": {"train_iters": iterations},
                "scheduler": {"lr_decay_iters": 10, "use_checkpoint_opt_param_scheduler": True},
                "checkpoint": checkpoint,
            }
            records[name] = run_distributed(_train, 4, script, chunks | changes)
        assert len(records["ours"][-1].iterations) == 5
        assert differences(records["ours"], records["stock"]) == []


def _with(flags: str, folder: Path) -> str:
    """Return a script that calls `fold3d.bridge`."""
    script = changed("Megatron-Bridge", folder, SCRIPT)
    script.write_text(script.read_text().replace(SHOWN, f"{flags}, device='cpu'"))
    return str(script)


def _train(script: str, changes: Changes) -> Record:
    """Run a script on this rank, with further values of its configuration."""
    sys.meta_path.append(Imitation())
    sys.argv = [script, json.dumps(changes)]
    from megatron.bridge.training import checkpointing, train
    from megatron.bridge.training import eval as evaluation

    for module in (train, evaluation):  # what the imitation cannot know: no model is distilled
        module.get_tensor_shapes_adjust_fn_for_distillation = lambda *_, **__: None
    checkpointing.save_sharded_modelopt_state = lambda *_: None  # nor quantized
    platform = [*_on_cpu()]
    if script == str(SCRIPT):  # else ours are installed
        *_, helpers = bridge_config.patches(lambda *_: None)
        platform += [helpers, *cpu.patches()]
    with apply(platform):
        return recorded(
            lambda: runpy.run_path(script, run_name="__main__"), loops=(train, evaluation)
        )


def _on_cpu() -> tuple[Patch, ...]:
    """Bridge's own counterparts of what ``--device cpu`` patches in Megatron."""
    training = "megatron.bridge.training"
    return (
        around(
            f"{training}.initialize:initialize_megatron",
            rebinds=(f"{training}.setup:initialize_megatron",),
        )(lambda upstream, **given: upstream(**given, allow_no_cuda=True)),
        replace(f"{training}.initialize:_warmup_jit_function", lambda *_, **__: None),
    )


class Anything(type):
    """A class that has every name, as a class of this kind."""

    def __getattr__(cls, name: str) -> Any:
        return _anything(cls, name)


class Imitated(ModuleType):
    """A module that has every name, as a class that does nothing."""

    __path__: list[str] = []  # noqa: RUF012  (as of a package)
    __version__ = "99"

    def __getattr__(self, name: str) -> Any:
        return _anything(self, name)


def _anything(owner: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    made = Anything(name, (), {})
    setattr(owner, name, made)
    return made


class Imitation(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds each absent package, after all others have looked."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        is_absent = any(f"{name}.".startswith(f"{package}.") for package in IMITATED)
        return ModuleSpec(name, self, is_package=True) if is_absent else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Imitated(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass
