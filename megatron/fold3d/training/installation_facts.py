"""Print facts about an installation that need torch and Megatron, as JSON for ``fold3d doctor``.

It runs in a separate process, since a torch that does not fit its machine may crash at import.
Under torchrun every rank starts one. These processes connect like the ranks of a training job, and
the first one reports for all.
"""

import json
import logging
import os
import re
import sys
import warnings
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from packaging.version import Version

import fold3d_patches
from fold3d_patches.cpu.compiler import uncompiled
from fold3d_patches.registry import MEGATRON, PatchError
from megatron.fold3d.commands.installation import Finding, Verdict
from megatron.fold3d.config.all_flags import add_arguments
from megatron.fold3d.config.gpu_settings import OFFLOAD_LIBRARY, blocking_settings
from megatron.fold3d.config.read_config import read_config
from megatron.fold3d.runtime import preemption
from megatron.fold3d.runtime.agreement import gathered, slowest
from megatron.fold3d.runtime.measure import lanes, layer_rates
from megatron.fold3d.upstream.pretrain import tried

_PREEMPTION = Path(preemption.__file__).parent
_TIMEOUT = timedelta(seconds=120)
_CONTEXT_BYTES = 3 << 30  # at most, of CUDA and NCCL in this process
_MOST_DRIFT = 0.15
# Packages with a range of versions, and the extra of ours that has it.
_TESTED = {"torch": "train", "transformer-engine": "gpu"}
_GLOO = "what ranks on CPUs talk over; every build of torch for Linux has it"
_SCHEDULES = {
    "aiao": "--schedule aiao",
    "DP.sync across iterations": "--schedule aiao:step=next --overlap-grad-reduce --clip-grad 0",
    "tracing stock": "--schedule stock --trace unused",
}


def main() -> None:
    """Print the findings as one JSON object on the last line; rank 0 prints those of all ranks."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    requirements: Sequence[str] = ()
    with suppress(metadata.PackageNotFoundError):  # imported from a checkout
        requirements = metadata.requires("fold3d") or ()
    findings = [*untested(requirements), pair(), *_torch(), *_extensions(), *_patches()]
    measured: list[lanes.Link] = []
    machine: dict[str, Any] = {}
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        others, measured, machine = meet(findings, measures=sys.argv[1:] == ["measure"])
        findings += others
    report = {
        "findings": [asdict(finding) for finding in findings],
        "links": measured,
        "machine": machine,
    }
    sys.stdout.write(json.dumps(report) + "\n")


def untested(requirements: Sequence[str]) -> Iterator[Finding]:
    """Name the packages that are installed in a version that the tests do not run with.

    Args:
        requirements: the package's own, as its metadata has them.
    """
    for requirement in map(Requirement, requirements):
        extra = _TESTED.get(requirement.name)
        if requirement.marker is None or not requirement.marker.evaluate({"extra": extra or ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            found = f"{version}; the tests run with {requirement.specifier}"
            fix = f"pip install '{requirement.name}{requirement.specifier}'"
            yield Finding(requirement.name, "note", found, fix)


def pair() -> Finding:
    """Tell how the tests ended with these versions of Megatron-core and torch."""
    from megatron.core.package_info import __version__

    # A container's build as 2.13.0a0+nv26.1, or 0.19.0rc1, counts as the release.
    megatron, torch_ = (Version(v).base_version for v in (__version__, torch.__version__))
    found = f"Megatron-core {megatron} with torch {torch_}"
    if told := tried(megatron, torch_):
        return Finding("versions", "ok", f"{found}, tried {told}")
    fix = f"it may work; in the checkout: python -m scripts.try_versions {torch_}:{megatron}"
    return Finding("versions", "note", f"{found}: nobody has tried this pair", fix)


def _torch() -> Iterator[Finding]:
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    if not torch.cuda.is_available():
        if Path("/proc/driver/nvidia").exists():
            fix = "install the torch build for this driver: https://pytorch.org/get-started"
            yield Finding("GPUs", "bad", f"the machine has some, torch ({build}) finds none", fix)
        else:
            yield Finding(
                "GPUs", "note", f"none; torch is built {build}", "train with --device cpu"
            )
        yield Finding("gloo", "ok" if dist.is_gloo_available() else "bad", _GLOO)
        return
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    kinds = sorted({f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)" for gpu in gpus})
    yield Finding("GPUs", "ok", f"{len(gpus)} x {', '.join(kinds)}, torch is built with {build}")
    version = ".".join(map(str, torch.cuda.nccl.version()))
    yield Finding("NCCL", "ok", version)
    yield architectures(
        {gpu.name: (gpu.major, gpu.minor) for gpu in gpus}, torch.cuda.get_arch_list(), build
    )
    yield connections(os.environ)
    if OFFLOAD_LIBRARY.exists():
        yield Finding("offload library", "ok", str(OFFLOAD_LIBRARY))
    else:
        found = "not built; --offload-activations and --lazy-inter-segment need it"
        yield Finding("offload library", "note", found, "make build-cuda")


def architectures(
    gpus: Mapping[str, tuple[int, int]], built_for: Sequence[str], build: str
) -> Finding:
    """Tell whether this torch has kernels for the GPUs.

    Args:
        built_for: the list of ``torch.cuda.get_arch_list``, with names such as ``sm_80``.
    """
    numbers = (re.match(r"sm_(\d+)", name) for name in built_for)
    known = [divmod(int(number[1]), 10) for number in numbers if number]
    for name, (major, minor) in gpus.items():
        if not any(own == major and least <= minor for own, least in known):
            found = f"{name} is sm_{major}{minor}; torch ({build}) has {' '.join(built_for)}"
            fix = "install a torch that has it; for V100 one of CUDA 12.6: docs/slurm.md"
            return Finding("architectures", "bad", found, fix)
    return Finding("architectures", "ok", " ".join(built_for))


def connections(environment: Mapping[str, str]) -> Finding:
    """Tell how many hardware queues the streams of a rank will share."""
    value = environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if blocking := [setting for setting, _ in blocking_settings(environment)]:
        found = f"{', '.join(blocking)}, with which only --schedule stock runs"
        names = ", ".join(setting.partition("=")[0] for setting in blocking)
        return Finding("launches", "bad", found, f"unset {names}")
    if value == "1":
        found = "CUDA_DEVICE_MAX_CONNECTIONS=1: all streams share one hardware queue"
        fix = "right for tensor or context parallelism before Blackwell, else give 32"
        return Finding("launches", "note", found, fix)
    return Finding("launches", "ok", f"CUDA_DEVICE_MAX_CONNECTIONS={value or '8, the default'}")


def _extensions() -> Iterator[Finding]:
    """Look for the compiled module of every stub."""
    for stub in sorted(_PREEMPTION.glob("_*.pyi")):
        name = f"{preemption.__name__}.{stub.stem}"
        try:
            yield Finding("extension", "ok", str(import_module(name).__file__))
        except ImportError as error:
            built = any(_PREEMPTION.glob(f"{stub.stem}.*.so"))
            found = f"{name} is built and does not load: {error}" if built else f"no {name}"
            verdict: Verdict = "bad" if built or torch.cuda.is_available() else "note"
            yield Finding("extension", verdict, found, "make extension")


def _patches() -> Iterator[Finding]:
    """Apply every patch and take it off again."""
    with uncompiled():
        from megatron.training.arguments import add_megatron_arguments

    parser = ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    add_arguments(parser)
    devices = ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",)
    applied = []
    try:
        for device in devices:
            with fold3d_patches.install_platform(device):
                applied.append(f"--device {device}")
        for name, flags in _SCHEDULES.items():
            config = read_config(parser.parse_args(flags.split()))
            with fold3d_patches.install_schedule(config, num_microbatches=1):
                applied.append(name)
    except PatchError as error:
        reason = " ".join((str(error), *getattr(error, "__notes__", ())))
        fix = f"pip install 'megatron-core[training]{MEGATRON}'"
        yield Finding("patches", "bad", reason, fix)
    else:
        yield Finding("patches", "ok", f"apply and come off: {', '.join(applied)}")


def meet(
    mine: list[Finding], *, measures: bool = False
) -> tuple[list[Finding], list[lanes.Link], dict[str, Any]]:
    """Return what other ranks found that this one did not, links, and if asked for the machine."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=_TIMEOUT)
    everyones = gathered(mine)
    measured = lanes.links(device)
    machine, busy_gpus = _machine(device) if measures else ({}, ())
    dist.destroy_process_group()
    others: dict[Finding, int] = {}
    for rank, findings in enumerate(everyones):
        for other in findings:
            if other not in mine:
                others.setdefault(other, rank)
    # Ranks that differ are worth a note even if each is fine.
    found = [
        replace(f, what=f"rank {rank}: {f.what}", verdict="bad" if f.verdict == "bad" else "note")
        for f, rank in others.items()
    ]
    return [*found, *busy_gpus], measured, machine


def _machine(device: torch.device) -> tuple[dict[str, Any], Sequence[Finding]]:
    """Return sizes, and the rates of the slowest rank; all ranks measure at the same time.

    Where a GPU is busy otherwise, return what was found in place of them.
    """
    memory_bytes = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    of_device, of_others, multiprocessors = memory_bytes, 0.0, 1
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        of_device = float(properties.total_memory)
        multiprocessors = properties.multi_processor_count
        free, total = torch.cuda.mem_get_info(device)
        of_others = float(total - free - torch.cuda.memory_reserved(device))
    layers, drift = layer_rates.layer_rates(device)
    memory_s, of_others = slowest([1 / layer_rates.memory_bytes_per_s(device), of_others], device)
    if device.type == "cuda" and (finding := busy(of_others, drift)) is not None:
        return {}, (finding,)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return {
        "num_nodes": dist.get_world_size() // here,
        "gpus_per_node": here,
        "layers": [(*sizes, rate) for sizes, rate in layers],
        "host_copy_bytes_per_s": 1 / lanes.host_copies(device).s_per_byte,
        "device_bytes_per_s": 1 / memory_s,
        "multiprocessors": multiprocessors,
        "memory_bytes": of_device if device.type == "cuda" else memory_bytes / here,
        "host_memory_bytes": memory_bytes,
    }, ()


def busy(of_others: float, drift: float) -> Finding | None:
    """Return what shows that another job computes on a GPU that is measured.

    Args:
        of_others: bytes of its memory that are not this process's tensors.
        drift: by which part a layer's time changed meanwhile.
    """
    if of_others > _CONTEXT_BYTES:
        found = f"other processes hold {of_others / 2**30:.1f} GiB of a GPU that is to be measured"
    elif drift > _MOST_DRIFT:
        found = f"a layer's time changed by {drift:.0%} between two measurements on a GPU"
    else:
        return None
    fix = "end the other job (nvidia-smi lists it), or measure on nodes of your own"
    return Finding("busy GPU", "bad", f"{found}; measured times are to be of this job alone", fix)


if __name__ == "__main__":
    main()
