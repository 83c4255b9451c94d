"""Each patch against the installed wheel: what fails here after an upgrade is what to read."""

import functools
import inspect
import json
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from fold3d_patches import (
    coded_sums,
    compile_helpers,
    cpu,
    delta_gather,
    many_queues,
    parsed_once,
    unfused_layers,
)
from fold3d_patches.registry import Patch, apply
from fold3d_patches.schedule import (
    backward_post_hook,
    checkpoint,
    due_steps,
    embedding_grads,
    finished_sums,
    get_forward_backward_func,
    gradient_buckets,
    linear,
    nccl_options,
    optimizer_step,
    paired_layers,
    script_settings,
    tensor_parallel_group,
)
from fold3d_patches.trace import collectives, spans
from megatron.fold3d.predict.search.measured_search import measured_search
from megatron.fold3d.runtime.auto_schedule import AutoSchedule
from megatron.fold3d.runtime.grad_sync.coded_sums import CodedSums
from megatron.fold3d.runtime.grad_sync.delta_gather import DeltaGather
from megatron.fold3d.runtime.grad_sync.due_steps import DueSteps
from megatron.fold3d.runtime.grad_sync.other_shards import ReplicatedSegments
from megatron.fold3d.runtime.offload.offloader import Offloader
from megatron.fold3d.runtime.tensor_parallel.baton import Baton
from megatron.fold3d.runtime.trace.metrics import Metrics
from megatron.fold3d.runtime.trace.tracer import Tracer
from megatron.fold3d.runtime.weight_grads.delayed_linear import DelayedWeightGrads
from megatron.fold3d.runtime.weight_grads.engine_modules import EngineWeightGrads
from megatron.fold3d.upstream import versions
from tests.configs import CONFIG
from tests.programs import printed

DUE = DueSteps(CONFIG)
TRACED = replace(CONFIG, trace=Path("trace"))
NO_METRICS = Metrics(lambda: None, lambda: None)
TRACER = Tracer(TRACED, NO_METRICS)
PATCHES = (
    *compile_helpers.PATCHES,
    *many_queues.PATCHES,
    checkpoint.patch(Offloader(CONFIG)),
    get_forward_backward_func.patch(lambda **_: []),
    *script_settings.PATCHES,
    *due_steps.patches(DUE),
    optimizer_step.patch(
        DUE, NO_METRICS, ReplicatedSegments(), AutoSchedule(CONFIG, measured_search)
    ),
    *embedding_grads.PATCHES,
    *gradient_buckets.PATCHES,
    linear.patch(DelayedWeightGrads()),
    backward_post_hook.patch(EngineWeightGrads()),
    nccl_options.patch(3, 1),
    tensor_parallel_group.patch(Baton()),
    *paired_layers.patches(Baton()),
    *unfused_layers.PATCHES,
    *cpu.patches(),
    *coded_sums.patches(CodedSums(measures=True)),
    *delta_gather.patches(DeltaGather(measures=True)),
    *spans.iteration(TRACER),
    *collectives.patches(TRACER),
    *spans.updates(TRACER),
    *spans.computations(TRACER),
    *(parsed_once.PATCHES if versions.pretrain_parses_flags() else ()),
    *(finished_sums.PATCHES if versions.sums_are_awaited_once() else ()),
)


@pytest.fixture(scope="session", autouse=True)
def _everything_imported() -> None:
    import_module("megatron.fold3d.training.gpt")


def symbol(target: str) -> Any:
    module, _, path = target.partition(":")
    owner = functools.reduce(getattr, path.split(".")[:-1], import_module(module))
    return inspect.getattr_static(owner, path.rpartition(".")[2])


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.target)
def test_the_patch_fits_the_installed_upstream(patch: Patch) -> None:
    sites = [s for s in (patch.target, *patch.rebinds) if s.partition(":")[0] in sys.modules]
    before = [symbol(site) for site in sites]
    with apply([patch]):
        during = [symbol(site) for site in sites]
        assert not any(now is then for now, then in zip(during, before, strict=True))
    assert [symbol(site) for site in sites] == before


def test_all_patches_fit_together() -> None:
    apply(PATCHES).close()


def test_no_module_of_megatron_holds_a_patched_symbol_under_another_name() -> None:
    of_one_module = (*parsed_once.PATCHES, *coded_sums.patches(CodedSums(measures=True)))
    own_names = [patch.target for patch in of_one_module]  # on purpose
    patched = {id(symbol(p.target)): p for p in PATCHES if p.target not in own_names}
    forgotten = [
        f"{name}:{attribute} is {patch.target}"
        for name, module in list(sys.modules.items())
        if name.startswith("megatron.") and not name.startswith("megatron.fold3d.")
        for attribute, value in list(vars(module).items())
        if (patch := patched.get(id(value))) is not None
        and f"{name}:{attribute}" not in (patch.target, *patch.rebinds)
    ]
    assert forgotten == []


@pytest.mark.processes
def test_importing_the_package_patches_nothing() -> None:
    script = f"""
import json, sys
from importlib import import_module
import fold3d_patches
assert not [m for m in sys.modules if m.startswith(("torch", "megatron.core"))], "not lazy"
from tests.patches.test_upstream import symbol
targets = {[patch.target for patch in PATCHES]}
before = [id(symbol(target)) for target in targets]
for name in ("registry", "compile_helpers", "cpu", "cpu.flags", "schedule"):
    import_module("fold3d_patches." + name)
for name in ("launch", "gpt"):
    import_module("megatron.fold3d.training." + name)
print(json.dumps([t for t, b in zip(targets, before) if id(symbol(t)) != b]))
"""
    found = printed(sys.executable, "-W", "ignore", "-c", script)
    assert json.loads(found.splitlines()[-1]) == []
