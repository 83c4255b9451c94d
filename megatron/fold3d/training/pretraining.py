"""The common parts of training a GPT and a BERT: options of their data, and checks."""

import functools
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import fields
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.object_storage_utils import is_object_storage_path
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training import get_args, get_tokenizer
from megatron.training.utils import get_blend_and_blend_per_split

from megatron.fold3d.config.spelling import flag_of

PARTS = ("training", "validation", "test")
# Prefixes of data, and their weights if they have some.
Blend = tuple[list[str], list[float] | None]
# Times the largest loss so far: what Megatron's own script takes for a spike.
SPIKE = 10.0


def dataset_options(args: Namespace, kind: Any) -> dict[str, Any]:
    """Return what flags say of Megatron's dataset configuration of a kind, by the names of both."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    same = (field.name for field in fields(kind) if field.init and hasattr(args, field.name))
    return {
        **{name: getattr(args, name) for name in same},
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "tokenizer": get_tokenizer(),
        "blend": blend,
        "blend_per_split": blend_per_split,
        "path_to_cache": args.data_cache_path,
    }


def check_loss(loss: torch.Tensor) -> None:
    """End the run if a micro-batch's loss is NaN or infinite, unless the flags say otherwise.

    With ``--check-for-spiky-loss``, a loss far above all previous ones is recomputed, and the run
    goes on. ``loss`` is 0-d on the device; the host waits for it.
    """
    args, machine = get_args(), get_rerun_state_machine()
    for is_wrong in (torch.isnan, torch.isinf) if args.check_for_nan_in_loss_and_grad else ():
        machine.validate_result(
            result=loss,
            rejection_func=is_wrong,
            message=f"{is_wrong.__name__} of the loss of a micro-batch",
            tolerance=0.0,  # a forward pass repeats exactly
            fatal=True,
        )
    if args.check_for_spiky_loss:
        machine.validate_result(
            result=loss,
            rejection_func=functools.partial(
                machine.is_unexpectedly_large, threshold=SPIKE, context="loss"
            ),
            message="spike in the loss of a micro-batch",
            tolerance=0.0,
            fatal=False,
        )


def check_run(args: Namespace, foreign: tuple[str, ...], trains: str) -> None:
    """Refuse another model's options, and data or kernels that are not there.

    Args:
        foreign: options for another model or other data; to ignore them would be to train
            something else.
        trains: the models that the script trains, in words.

    Raises:
        ValueError: one message in the form found, rule, fix.
    """
    if found := [flag_of(name) for name in foreign if getattr(args, name)]:
        raise ValueError(f"{', '.join(found)}: this script trains {trains}")
    if problems := [*_unread(args)]:
        raise ValueError("\n".join(problems))
    if args.check is None and (absent := [*absent_packages(args)]):
        raise ValueError("\n".join(absent))
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    prefixes = [prefix for b in (blend, *(blend_per_split or ())) if b for prefix in b[0]]
    missing = [prefix for prefix in prefixes if not IndexedDataset.exists(prefix)]
    if missing or not (prefixes or args.mock_data):
        raise ValueError(
            f"no data{' at ' if missing else ''}{', '.join(missing)}: --data-path takes the path "
            "of a .bin and an .idx file, without the ending; make them with "
            f"scripts/prepare_data.py{'' if 'mock_data' in foreign else ', or give --mock-data'}"
        )
    by_documents = "mock_data" in foreign  # as a BERT's data are split, a GPT's are by sequences
    if not args.mock_data and (problems := [*_parts(args, blend, blend_per_split, by_documents)]):
        raise ValueError("\n".join(problems))


def absent_packages(args: Namespace) -> Iterator[str]:
    """Yield one message (found, rule, fix) for each package that a rank needs and is not here."""
    if args.transformer_impl == "transformer_engine" and find_spec("transformer_engine") is None:
        from megatron.fold3d.commands.installation import install

        yield (
            "--transformer-impl transformer_engine: Transformer Engine is not installed; "
            f"{install('gpu')}, or give --transformer-impl local"
        )
    if (instances := args.num_distributed_optimizer_instances) > 1 and find_spec("einops") is None:
        yield (
            f"--num-distributed-optimizer-instances {instances}: Megatron arranges their ranks "
            "with einops, which is not installed; run pip install einops, or drop the option"
        )


def _unread(args: Namespace) -> Iterator[str]:
    """Yield options with which Megatron reads data on stages that have none."""
    ranks = args.pipeline_model_parallel_size
    for name in ("full_validation", "iterations_to_skip"):
        if getattr(args, name) and ranks > 2:
            yield (
                f"{flag_of(name)} with --pipeline-model-parallel-size {ranks}: Megatron reads data "
                "on each rank, and only the first and the last have some; give 2, or drop it"
            )


def _parts(
    args: Namespace,
    blend: Blend | None,
    blend_per_split: list[Blend | None] | None,
    by_documents: bool,
) -> Iterator[str]:
    """Yield one message (found, rule, fix) for each part of the data that is needed and empty."""
    if blend is not None and args.split is None:  # Megatron has a default for --data-path alone
        yield "--split is missing: --data-args-path has one source for all; give 969,30,1, say"
        return
    evaluates = args.full_validation or args.eval_iters
    if blend is None:
        blends = blend_per_split or [None] * 3
        bounds = [of_part and (0.0, 1.0) for of_part in blends]
        train, valid = "without data for training", "without data for validation"
        more = "give it more documents"
    else:
        blends = [blend] * 3
        bounds = convert_split_vector_to_split_matrix(parse_and_normalize_split(args.split))
        train, valid = (f"--split {args.split}: nothing is for {name}" for name in PARTS[:2])
        more = "give more documents, or this part a larger share, or 0 if it is not wanted"
    if bounds[0] is None and not args.skip_train:
        yield f"{train}: there would be no iteration; give it some, or --skip-train"
    if bounds[1] is None and evaluates:
        yield f"{valid}, and --eval-iters is {args.eval_iters}; give it some, or --eval-iters 0"
    if getattr(args, "dataloader_fast_cache_load", False):
        return  # it asks not to look at the data
    for name, of_part, part in zip(PARTS, blends, bounds, strict=True):
        prefixes, weights = of_part or ((), None)
        if part is None or (len(prefixes) > 1 and weights is None):
            continue  # not built, or as long as it happens to be
        if by_documents and name != PARTS[0] and not evaluates:
            continue  # asked for no sample, a BERT's does not look for one
        for prefix in prefixes:
            if not is_object_storage_path(prefix) and not _has_tokens(prefix, part, by_documents):
                found = f"--split {args.split}: " if blend else ""
                yield (
                    f"{found}no token of {prefix} is for {name}: Megatron would look for one for "
                    f"ever; {more}"
                )


def _has_tokens(prefix: str, part: tuple[float, float], by_documents: bool) -> bool:
    data = IndexedDataset(prefix, mmap=False)
    bounds = data.document_indices if by_documents else range(len(data.sequence_lengths) + 1)
    # As `BlendedMegatronDatasetBuilder` rounds them.
    first, last = (bounds[round(share * float(len(bounds) - 1))] for share in part)
    return bool(data.sequence_lengths[first:last].any())
