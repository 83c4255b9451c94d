"""Compare the checkpoint that a run loads with its flags, before there is a process group.

Megatron finds a difference only when tensors do not fit: with a traceback on every rank that does
not name the flag.
"""

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.fold3d.config.spelling import flag_of

# What decides how large tensors are, or how they are named.
_SIZES = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "group_query_attention",
    "swiglu",
    "num_experts",
    "multi_latent_attention",
)
# What adds tensors. A checkpoint may have more of them than the run: Megatron leaves those out.
_PARTS = (
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "untie_embeddings_and_output_weights",
    "mtp_num_layers",
)
# Chunks and shards that the older format has by their number.
_LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
)
_NAMED = {  # flags that are named otherwise
    "add_bias_linear": "disable_bias_linear",
    "virtual_pipeline_model_parallel_size": "segments",
}


def check_checkpoint(args: Namespace) -> None:
    """Check that the run fits the checkpoint of ``--load``, if there is one.

    Raises:
        ValueError: one line for each flag that does not fit, or why nothing could be read.
    """
    if args.load is None or args.non_persistent_ckpt_type is not None:
        return
    from megatron.training.checkpointing import get_load_checkpoint_path_by_args

    tracker = Path(args.load) / "latest_checkpointed_iteration.txt"
    if not (tracker.is_file() or args.ckpt_step):
        return
    folder = Path(get_load_checkpoint_path_by_args(args))
    saved, is_sharded = _saved(args, folder)
    if is_sharded and not (args.use_dist_ckpt or args.auto_detect_ckpt_format):
        raise ValueError(
            f"--ckpt-format {args.ckpt_format}: {folder} is in the format torch_dist; give "
            "--ckpt-format torch_dist, or --auto-detect-ckpt-format"
        )
    if saved is None:
        return
    problems = [*_differences(args, saved, is_sharded)]
    if problems:
        raise ValueError(
            "\n".join(f"--load {args.load}: {folder.name} there has {p}" for p in problems)
        )


def _saved(args: Namespace, folder: Path) -> tuple[Namespace | None, bool]:
    """Return the flags of the run that wrote a checkpoint, and whether its format is the newer."""
    from megatron.training.checkpointing import _load_base_checkpoint
    from torch.distributed.checkpoint.api import CheckpointException  # no Exception

    try:
        state, _, _, kind = _load_base_checkpoint(args.load, args, rank0=True)
    except SystemExit:  # Megatron has printed why, and would leave as if all were well
        error: str = "see above"
    except (Exception, CheckpointException) as caught:  # noqa: BLE001  (files may hold anything)
        error = f"{type(caught).__name__}: {(str(caught).splitlines() or [''])[0]}"
    else:
        saved: Any = (state or {}).get("args")
        return saved, kind.name == "GLOBAL"
    older = sorted(path.name for path in folder.parent.glob("iter_*") if path.name < folder.name)
    other = f"give --ckpt-step {int(older[-1][5:])}" if older else "there is no older one"
    raise ValueError(f"--load {args.load}: {folder.name} there cannot be read, {error}; {other}")


def _differences(args: Namespace, saved: Namespace, is_sharded: bool) -> Iterator[str]:
    """Yield each flag's value in the checkpoint, what the run has instead, and what to do."""
    names = list(_SIZES)
    if not (args.finetune or args.no_load_optim):
        names.append("optimizer")
    if not is_sharded:
        names += _LAYOUT
    if args.position_embedding_type == "learned_absolute":
        names += ("position_embedding_type", "max_position_embeddings")
    if saved.hidden_size != args.hidden_size:
        names.remove("ffn_hidden_size")  # it follows
    names += (part for part in _PARTS if getattr(args, part, None))
    for name in names:
        if not hasattr(saved, name):
            continue  # written by another version
        theirs, ours = getattr(saved, name), getattr(args, name, None)
        if theirs != ours:
            fix = "give --no-load-optim" if name == "optimizer" else "load another checkpoint"
            flag = flag_of(_NAMED.get(name, name))
            yield f"{name} {theirs}, this run has {ours}; change {flag}, or {fix}"
