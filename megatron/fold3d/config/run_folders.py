"""Check the folders and formats of the checkpoints and other files that a run reads or writes.

The checks make no folder, and see only this node's view of the file system.
"""

import os
import re
from argparse import Namespace
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from megatron.fold3d.config.spelling import flag_of

_ITERATION = re.compile(r"iter_(\d{7,})")  # Megatron's folder of one checkpoint
_TRACKER = "latest_checkpointed_iteration.txt"
_WRITTEN = {
    "save": "checkpoints",
    "tensorboard_dir": "TensorBoard's files",
    "data_cache_path": "the indices of data",
}


def folder_problems(args: Namespace) -> Iterator[str]:
    """Yield one message (found, rule, fix) for each folder that cannot serve its flag."""
    if args.enable_msc and find_spec("multistorageclient"):
        return  # paths may name objects of a store; without the package Megatron opens files
    for name, holds in _WRITTEN.items():
        if (path := getattr(args, name)) is not None:
            yield from unwritable(flag_of(name), Path(path), holds)
    if args.non_persistent_ckpt_type is None:
        yield from _checkpoint(args)


def unwritable(flag: str, path: Path, holds: str) -> Iterator[str]:
    """Yield one message if a run could not write to the folder ``path``, which may not exist yet.

    Args:
        holds: the contents of the folder, in words.
    """
    there = next(part for part in (path, *path.absolute().parents) if part.exists())
    if not there.is_dir():
        yield f"{flag} {path}: {there} is a file, {holds} need a folder; give another name"
    elif not os.access(there, os.W_OK | os.X_OK):
        yield f"{flag} {path}: no permission to write to {there}; give another folder"


def _checkpoint(args: Namespace) -> Iterator[str]:
    """Yield one message per reason why the checkpoint to load cannot be loaded."""
    flags = {"--load": args.load, "--pretrained-checkpoint": args.pretrained_checkpoint}
    folders = {flag: Path(path) for flag, path in flags.items() if path is not None}
    for flag, folder in folders.items():
        if folder.is_file():
            yield f"{flag} {folder}: it is a file; give the folder that --save names"
            return
        if (found := _ITERATION.fullmatch(folder.name)) and folder.is_dir():
            yield (
                f"{flag} {folder}: it is one iteration, Megatron looks for a folder of them; "
                f"give {flag} {folder.parent} --ckpt-step {int(found[1])}"
            )
            return
    if not folders:
        if args.ckpt_step:
            yield (
                f"--ckpt-step {args.ckpt_step} without --load: there is nothing to take it from; "
                "give --load DIR"
            )
        return
    saved = {flag: folder for flag, folder in folders.items() if (folder / _TRACKER).is_file()}
    flag, folder = next(iter((saved or folders).items()))
    if args.ckpt_step:
        yield from _iteration(f"--ckpt-step {args.ckpt_step}", folder, args.ckpt_step)
    elif saved:
        text = (folder / _TRACKER).read_text(encoding="utf-8", errors="replace").strip()
        if text.isdecimal():
            yield from _iteration(f"{_TRACKER} names iteration {text}", folder, int(text))
        elif text != "release":
            yield (
                f"{flag} {folder}: {_TRACKER} there says {text[:20]!r}, it is a number or "
                "release; write the number of an iteration into it"
            )
    elif demands := [*_demands(args)]:
        yield (
            f"{' and '.join(demands)}: {folder} has no {_TRACKER}, so no checkpoint; give the "
            "folder that --save named"
        )


def _demands(args: Namespace) -> Iterator[str]:
    """Yield the flags that need a checkpoint."""
    if args.exit_on_missing_checkpoint:
        yield "--exit-on-missing-checkpoint"
    if args.pretrained_checkpoint is not None:
        yield f"--pretrained-checkpoint {args.pretrained_checkpoint}"
    sizes = (args.hidden_size, args.num_attention_heads, args.max_position_embeddings)
    layers, length = args.num_layers, args.seq_length
    given = (*sizes, layers or args.encoder_num_layers, length or args.encoder_seq_length)
    if args.use_checkpoint_args and None in given:
        yield "--use-checkpoint-args without all sizes of the model"


def _iteration(found: str, folder: Path, iteration: int) -> Iterator[str]:
    names = (_ITERATION.fullmatch(path.name) for path in folder.glob("iter_*"))
    there = sorted(int(name[1]) for name in names if name)
    if iteration not in there:
        has = f"it has {', '.join(map(str, there))}" if there else "it has none"
        yield f"{found}: no such iteration in {folder}, {has}; give one that is there"


def format_problems(args: Namespace) -> Iterator[str]:
    """Yield one message (found, rule, fix) per option whose state would be lost.

    Megatron itself fails only when it saves or resumes, and then the run's work is lost.
    """
    saves = args.save is not None and not args.no_save_optim
    loads = args.load is not None and not (args.no_load_optim or args.finetune or args.skip_train)
    if args.optimizer == "sgd":
        if args.use_distributed_optimizer and not args.optimizer_cpu_offload:
            yield (
                "--optimizer sgd with --use-distributed-optimizer: Megatron 0.19.2 shards the "
                "state of Adam only; drop one of the two"
            )
        if args.ckpt_format == "torch_dist" and (saves or loads):
            flag, verb = ("--save", "save") if saves else ("--load", "load")
            yield (
                f"--optimizer sgd with {flag} and --ckpt-format torch_dist: Megatron 0.19.2 "
                "writes its momentum in this format and cannot load it again; give --ckpt-format "
                f"torch, or --no-{verb}-optim"
            )
    flag = "--save" if args.save is not None else "--load" if args.load is not None else ""
    tied = not args.untie_embeddings_and_output_weights
    shared = args.mtp_num_layers and tied and args.pipeline_model_parallel_size > 1
    if flag and shared and args.ckpt_format == "torch_dist":
        yield (
            f"--mtp-num-layers {args.mtp_num_layers} with {flag} and --ckpt-format torch_dist: "
            "Megatron 0.19.2 has no name there for an embedding that the last of several pipeline "
            "ranks shares; give --untie-embeddings-and-output-weights, or --ckpt-format torch"
        )
    if args.ckpt_step and loads and args.use_distributed_optimizer and args.ckpt_format == "torch":
        yield (
            f"--ckpt-step {args.ckpt_step} with --use-distributed-optimizer and --ckpt-format "
            "torch: Megatron 0.19.2 takes the weights from this iteration, and the optimizer's "
            f"state from the last one; write {args.ckpt_step} into "
            "latest_checkpointed_iteration.txt there and drop --ckpt-step, or give --no-load-optim"
        )
