"""Check the requirements of a training run before Megatron does.

Megatron itself checks these options only when it uses them: after it has made process groups, a
model and data, and with a traceback on every rank.
"""

import math
import os
import re
from argparse import Namespace
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from megatron.fold3d.config.job_sizes import size_problems, written_out
from megatron.fold3d.config.refusals import refused, value_of
from megatron.fold3d.config.run_folders import folder_problems, format_problems
from megatron.fold3d.config.schedule_flags import word_of
from megatron.fold3d.config.segment_flags import num_segments
from megatron.fold3d.config.settings import asked
from megatron.fold3d.config.spelling import flag_of

# Attributes of Megatron's namespace; each is named as its flag.
_NEEDED = {
    "lr": "the highest learning rate; give --lr 1e-4, say",
    "eval_interval": "Megatron counts evaluations with it even where --eval-iters is 0; give the "
    "number of iterations between two, say 1000",
}
_LOGITS = "Megatron 0.19.2 looks for the output layer on every rank; give 1, or drop the folder"
# Options that Megatron cannot combine, in the form of `refusals.TABLE`.
_CLASHES = {
    "--bf16 with {}": {"--fp16": "parameters have one precision; drop one of the two"},
    "--swiglu with {}": {"--squared-relu": "an MLP has one activation; drop one of the two"},
    "--logits-save-dir with {}": {"--pipeline-model-parallel-size above 1": _LOGITS},
    "--logits-load-dir with {}": {"--pipeline-model-parallel-size above 1": _LOGITS},
    "--wandb-project with {}": {"without --wandb-exp-name": "a run has a name there; give one"},
    "--iterations-to-skip with {}": {
        "several segments": "Megatron then reads the data of one segment, and each has its own; "
        "have one segment, or drop it",
    },
    "--async-save with {}": {
        "--ckpt-format torch": "Megatron fails when it first saves; drop one of the two"
    },
    "--multiple-validation-sets with {}": {
        "without --full-validation": "Megatron evaluates on several sets as a whole only; add {}",
    },
    "--full-validation with {}": {
        "without --multiple-validation-sets": "Megatron 0.19.2 takes the number of iterations for "
        "a list, which several sets have; add {}",
        "several segments": "Megatron takes the data of the segments for those of the sets; have "
        "one segment, or drop it",
    },
    "--enable-ft-package with {}": {"without --save": "its state is kept there; give {}"},
    "--recompute-num-layers above 1 with {}": {
        "--mtp-num-layers and --recompute-method uniform": "layers of multi-token prediction are "
        "recomputed one by one; give --recompute-num-layers 1"
    },
}
_PACKAGES = {
    "--wandb-project": "wandb",
    "--enable-ft-package": "nvidia-resiliency-ext",
    "--fault-injector-ranks": "nvidia-resiliency-ext",
    "--fault-injector-num-ranks": "nvidia-resiliency-ext",
}


def run_problems(args: Namespace) -> Iterator[str]:
    """Yield one message (found, rule, fix) per missing requirement or option that would fail."""
    if any(size_problems(args)):
        return  # `size_problems` reports the sizes, by which other rules divide
    yield from _missing(args)
    yield from _tokenizer(args)
    yield from _clashes(args)
    yield from format_problems(args)
    yield from _data(args)
    yield from _length(args)
    if not (args.use_checkpoint_args and args.use_mp_args_from_checkpoint_args):
        yield from _ranks(args)
    yield from folder_problems(args)


def _missing(args: Namespace) -> Iterator[str]:
    for name, rule in _NEEDED.items():
        if getattr(args, name) is None and not (name == "lr" and args.skip_train):
            yield f"{flag_of(name)} is missing: {rule}"


def _tokenizer(args: Namespace) -> Iterator[str]:
    kind = args.tokenizer_type
    if kind in ("NullTokenizer", "NullMultimodalTokenizer") and not args.vocab_size:
        yield (
            f"--tokenizer-type {kind} without --vocab-size: it has no tokens of its own; give "
            "their number"
        )
    for flag, file in {"--vocab-file": args.vocab_file, "--merge-file": args.merge_file}.items():
        if file and not Path(file).exists():
            yield f"{flag} {file}: no such file; give the tokenizer's"


def _clashes(args: Namespace) -> Iterator[str]:
    """Yield flags that cannot be combined, or that lack an installed package."""
    for form, rows in _CLASHES.items():
        value = value_of(form)
        if given := asked(args, value):
            yield from refused(args, form.replace(value, given), rows)
    heads, groups = args.num_attention_heads, args.num_query_groups
    if args.group_query_attention and heads is not None and heads % groups:
        yield (
            f"--num-query-groups {groups} with --num-attention-heads {heads}: groups are equally "
            f"large; give a number that divides {heads}"
        )
    for name in ("hidden_dropout", "attention_dropout"):
        if not 0 <= (share := getattr(args, name)) <= 1:
            yield f"{flag_of(name)} {share}: it is a probability; give 0 to 1"
    if args.optimizer not in ("adam", "sgd") and find_spec("emerging_optimizers") is None:
        yield (
            f"--optimizer {args.optimizer}: it is in the package emerging-optimizers, which is "
            "not installed; install it, or give --optimizer adam"
        )
    for setting, package in _PACKAGES.items():
        if (given := asked(args, setting)) and find_spec(package.replace("-", "_")) is None:
            yield (
                f"{given}: the package {package} is not installed; run pip install {package}, or "
                "drop it"
            )
    layout, layers = args.pipeline_model_parallel_layout, args.num_layers
    if layout and layers and (found := written_out(layout).count("t")) != layers:
        yield (
            f"--pipeline-model-parallel-layout {layout} with --num-layers {layers}: it has {found} "
            "layers, each written as a t; give the same number"
        )
    if args.rerun_mode == "report_stats":
        yield (
            "--rerun-mode report_stats: Megatron 0.19.2 has no mode of that name when it starts; "
            "give validate_results or disabled"
        )
    if args.num_workers < 0:
        yield f"--num-workers {args.num_workers}: it is a number of processes; give 0 or more"


def _data(args: Namespace) -> Iterator[str]:
    """Yield one message for shares of data that Megatron would not accept."""
    parts = {name: getattr(args, f"{name}_data_path") for name in ("train", "valid", "test")}
    flags = [f"--{name}-data-path" for name, path in parts.items() if path]
    flags += ["--per-split-data-args-path"] if args.per_split_data_args_path else []
    if args.split is not None and flags:
        yield f"--split {args.split} with {flags[0]}: it has its parts already; drop --split"
    if args.split is not None and not _is_split(args.split):
        yield (
            f"--split {args.split}: it is the shares of training, validation and test, three "
            "numbers at most; give 969,30,1, say"
        )


def _is_split(text: str) -> bool:
    """Return True if Megatron finds shares in a text: it looks for digits and points only."""
    try:
        shares = [float(share) for share in re.findall(r"[.0-9]+", text)]
    except ValueError:
        return False
    return 1 <= len(shares) <= 3 and sum(shares) > 0


def _length(args: Namespace) -> Iterator[str]:
    """Yield one message per wrong number of iterations or samples."""
    if not (args.train_iters or args.train_samples):
        yield (
            "--train-iters is missing: how long to train; give --train-iters 1000, say, or "
            "--train-samples"
        )
        return
    unit = "iters" if args.train_iters else "samples"
    warmup, decay = (getattr(args, f"lr_{name}_{unit}") for name in ("warmup", "decay"))
    name = f"--lr-decay-{unit}" if decay else f"--train-{unit}"
    steps = decay or args.train_iters or args.train_samples
    if args.lr_warmup_fraction is not None and args.lr_warmup_fraction >= 1:
        yield (
            f"--lr-warmup-fraction {args.lr_warmup_fraction}: the rest is the learning rate's "
            "decay, and there has to be some; give 0.01, say"
        )
    elif args.lr_warmup_fraction is None and warmup >= steps and not args.skip_train:
        yield (
            f"--lr-warmup-{unit} {warmup} with {name} {steps}: the learning rate decays after its "
            "warm-up, and there is nothing left; give a shorter warm-up"
        )


def _ranks(args: Namespace) -> Iterator[str]:
    """Yield one message per size that does not fit the number of ranks."""
    parts = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    sizes = {name: getattr(args, name) for name in parts if getattr(args, name) > 1}
    model, world = math.prod(sizes.values()), int(os.environ.get("WORLD_SIZE", "1"))
    if world % model:
        product = f"{' * '.join(map(str, sizes.values()))} = " if len(sizes) > 1 else ""
        flags = " ".join(f"{flag_of(name)} {size}" for name, size in sizes.items())
        yield (
            f"{world} {'rank' if world == 1 else 'ranks'} with {flags}: a model takes {product}"
            f"{model} ranks; start torchrun with "
            f"--nproc-per-node {model}, say, or a multiple of {model} on all nodes together"
        )
        return
    replicas, batch = world // model, args.global_batch_size
    yield from stock_group_problems(args, replicas)
    if batch is None or args.micro_batch_size is None or args.decrease_batch_size_if_needed:
        return
    if batch % (at_once := args.micro_batch_size * replicas):
        yield (
            f"--global-batch-size {batch} with --micro-batch-size {args.micro_batch_size} and "
            f"{replicas} data-parallel {'replica' if replicas == 1 else 'replicas'}: each computes "
            f"equally many micro-batches; give a multiple of {at_once}"
        )


def stock_group_problems(args: Namespace, replicas: int) -> Iterator[str]:
    """Yield one message if stock's interleaved schedule cannot run the number of micro-batches."""
    ranks, size = args.pipeline_model_parallel_size, args.micro_batch_size
    segments = num_segments(args)
    is_stocks = word_of(args).order == "stock" and segments > 1
    if not is_stocks or ranks == 1 or size is None:
        return
    found = f"{segments} segments with --schedule stock"
    group = args.microbatch_group_size_per_vp_stage or ranks
    if group < ranks:
        yield (
            f"{found} and --microbatch-group-size-per-virtual-pipeline-stage {group}: a group has "
            f"a micro-batch for each of {ranks} ranks at least; give {ranks} or more"
        )
        return
    batch = args.global_batch_size or size * replicas  # as Megatron's validation
    batches = [("--global-batch-size", batch, size)]
    if (steps := args.step_batch_size_schedule) is not None:
        sizes = map(int, re.findall(r":\s*(\d+)", steps))
        batches = [("--step-batch-size-schedule", batch, size) for batch in sizes]
    of_evaluation = args.eval_global_batch_size, args.eval_micro_batch_size
    if args.eval_iters and (steps is not None or of_evaluation != (None, None)):
        evaluated = batch if of_evaluation[0] is None else of_evaluation[0]
        batches.append(("--eval-global-batch-size", evaluated, of_evaluation[1] or size))
    for flag, batch, size in batches:
        number = batch // (size * replicas)
        if number < group or 0 < number % group < ranks:
            yield (
                f"{found} and {flag} {batch}, {number} micro-batches: Megatron runs them in groups "
                f"of {group}, the last of {ranks} at least; give a multiple of "
                f"{group * size * replicas}, or --schedule interleaved"
            )
