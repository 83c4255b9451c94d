"""Measurements kept between runs: one file per shape of a run and kind of hardware.

A file is named after its shape and hardware, and is used only for runs with exactly these. To
measure again, delete it.
"""

import hashlib
import json
import os
import platform
import re
from argparse import Namespace
from pathlib import Path

import torch

from megatron.fold3d.predict.cost_model.hardware_profile import HardwareProfile
from megatron.fold3d.runtime.device import device_name

# The options of Megatron that a layer's time, or a transfer's, depends on.
SHAPE = (
    *("hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "num_query_groups"),
    *("seq_length", "micro_batch_size", "vocab_size", "swiglu", "normalization", "num_experts"),
    *("position_embedding_type", "attention_dropout", "hidden_dropout", "multi_latent_attention"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "use_tp_pp_dp_mapping", "sequence_parallel"),
    *("bf16", "fp16", "fp8"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
    *("transformer_impl", "attention_backend", "distributed_backend", "device"),
)


def cache_file(args: Namespace) -> Path:
    """Return the file of a run's shape on its hardware, whether it exists or not."""
    of = {name: getattr(args, name) for name in SHAPE} | {
        "nodes": os.environ.get("GROUP_WORLD_SIZE", "1"),  # torchrun counts them so
        "ranks": os.environ["WORLD_SIZE"],
        "accelerator": device_name(torch.device(args.device)),
        "cluster": re.sub(r"\d+", "", platform.node()),  # node017 is as good as node003
        "torch": torch.__version__,
    }
    text = json.dumps(of, sort_keys=True, default=str)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "fold3d" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def read(file: Path) -> HardwareProfile | None:
    """Return what was measured; None if there is no file, or it is of another version."""
    try:
        return HardwareProfile.from_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write(file: Path, measured: HardwareProfile) -> None:
    """Keep what was measured."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(f".{os.getpid()}")
    unfinished.write_text(measured.to_json(), encoding="utf-8")
    unfinished.replace(file)
