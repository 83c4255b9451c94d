"""What training a GPT and a BERT have in common: options of their data, and checks."""

from argparse import Namespace
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training import get_args, get_tokenizer
from megatron.training.utils import get_blend_and_blend_per_split

# Options that Megatron's flags and its datasets call by one name.
SAME_NAMES = (
    "allow_ambiguous_pad_tokens",
    "full_validation",
    "mid_level_dataset_surplus",
    "mmap_bin_files",
    "multiple_validation_sets",
    "num_dataset_builder_threads",
    "split",
)


def dataset_options(args: Namespace) -> dict[str, Any]:
    """Return what Megatron's dataset configurations ask for, whatever the model."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "tokenizer": get_tokenizer(),
        "blend": blend,
        "blend_per_split": blend_per_split,
        "path_to_cache": args.data_cache_path,
        **{name: getattr(args, name) for name in SAME_NAMES},
    }


def check_loss(loss: torch.Tensor) -> None:
    """End the run if the loss of a micro-batch is no number, unless the flags say otherwise."""
    if not get_args().check_for_nan_in_loss_and_grad:
        return
    for is_wrong in (torch.isnan, torch.isinf):
        get_rerun_state_machine().validate_result(
            result=loss,
            rejection_func=is_wrong,
            message=f"{is_wrong.__name__} of the loss of a micro-batch",
            tolerance=0.0,  # a forward pass repeats exactly
            fatal=True,
        )


def check_run(args: Namespace, foreign: tuple[str, ...], trains: str) -> None:
    """Refuse another model's options, and data or kernels that are not there.

    Args:
        args: Megatron's namespace.
        foreign: options for another model or other data; to ignore them would be to train
            something else.
        trains: what the script trains, in words.

    Raises:
        ValueError: what was asked for, why it cannot be, and what can.
    """
    if found := ["--" + name.replace("_", "-") for name in foreign if getattr(args, name)]:
        raise ValueError(f"{', '.join(found)}: this script trains {trains}")
    if args.transformer_impl == "transformer_engine" and find_spec("transformer_engine") is None:
        raise ValueError(
            "--transformer-impl transformer_engine: Transformer Engine is not installed; "
            'run pip install "fold3d[gpu]", or give --transformer-impl local'
        )
    if (instances := args.num_distributed_optimizer_instances) > 1 and find_spec("einops") is None:
        raise ValueError(
            f"--num-distributed-optimizer-instances {instances}: Megatron arranges their ranks "
            "with einops, which is not installed; run pip install einops, or drop the option"
        )
    if args.eval_interval is None:
        raise ValueError(
            "--eval-interval is missing: Megatron counts evaluations with it even where "
            "--eval-iters is 0; give the number of iterations between two, say 1000"
        )
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    prefixes = [prefix for b in (blend, *(blend_per_split or ())) if b for prefix in b[0]]
    missing = [prefix for prefix in prefixes if not IndexedDataset.exists(prefix)]
    if missing or not (prefixes or args.mock_data):
        raise ValueError(
            f"no data{' at ' if missing else ''}{', '.join(missing)}: --data-path takes the path "
            "of a .bin and an .idx file, without the ending; make them with "
            f"scripts/prepare_data.py{'' if 'mock_data' in foreign else ', or give --mock-data'}"
        )
