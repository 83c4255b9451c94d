"""Check the requirements of a training run before Megatron does.

Megatron itself checks these options only when it uses them: after it has made process groups, a
model and data, and with a traceback on every rank.
"""

import math
import os
import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from megatron.fold3d.config.checkpoint_formats import format_problems
from megatron.fold3d.config.job_sizes import size_problems
from megatron.fold3d.config.layer_split import written_out
from megatron.fold3d.config.refusals import refused, value_of
from megatron.fold3d.config.run_folders import folder_problems
from megatron.fold3d.config.schedule_flags import word_of
from megatron.fold3d.config.settings import asked
from megatron.fold3d.config.spelling import flag_of
from megatron.fold3d.plan.schedule_word import AUTO

# Attributes of Megatron's namespace; each is named as its flag is.
_NEEDED = {
    "micro_batch_size": "the sequences of a micro-batch; give 1, say",
    "lr": "the highest learning rate; give --lr 1e-4, say",
    "eval_interval": "Megatron counts evaluations with it even where --eval-iters is 0; give the "
    "number of iterations between two, say 1000",
}
_SIZES = {
    "num_layers": "the layers of the model; give --num-layers 24, say",
    "seq_length": "the tokens of a sequence; give --seq-length 1024, say",
    "hidden_size": "the width of a layer; give --hidden-size 1024, say",
    "num_attention_heads": "the heads of a layer; give --num-attention-heads 16, say",
    "max_position_embeddings": "the longest sequence; give as much as --seq-length, at least",
}
_BRING_SIZES = (
    *("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"),
    *("use_checkpoint_args", "hybrid_layer_pattern"),
)
# What Megatron cannot combine, in the form of `refusals.TABLE`.
_CLASHES = {
    "--bf16 with {}": {"--fp16": "parameters have one precision; drop one of the two"},
    "--swiglu with {}": {"--squared-relu": "an MLP has one activation; drop one of the two"},
    "--wandb-project with {}": {"without --wandb-exp-name": "a run has a name there; give one"},
    "--recompute-num-layers above 1 with {}": {
        "--mtp-num-layers and --recompute-method uniform": "layers of multi-token prediction are "
        "recomputed one by one; give --recompute-num-layers 1"
    },
}
_FROM_FILE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
_INDEX_HEADER = b"MMIDIDX\x00\x00"
_FROM_VOCABULARY = ("GPT2BPETokenizer", "BertWordPieceLowerCase", "BertWordPieceCase")


def run_problems(args: Namespace) -> Iterator[str]:
    """Yield one message (found, rule, fix) per missing requirement or option that would fail.

    Args:
        args: Megatron's namespace, as parsed.
    """
    if any(size_problems(args)):
        return  # already reported, and the other rules divide by them
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
    sizes_come = any(getattr(args, name) for name in _BRING_SIZES)
    for name, rule in (_NEEDED if sizes_come else _NEEDED | _SIZES).items():
        given = getattr(args, name), getattr(args, f"encoder_{name}", None)
        if given == (None, None) and not (name == "lr" and args.skip_train):
            yield f"{flag_of(name)} is missing: {rule}"


def _tokenizer(args: Namespace) -> Iterator[str]:
    kind = args.tokenizer_type
    if kind is None:
        yield (
            "--tokenizer-type is missing: it tells how many tokens there are; give the one that "
            "the data was made with, or NullTokenizer with --vocab-size"
        )
        return
    found = f"--tokenizer-type {kind} without"
    if kind in ("NullTokenizer", "NullMultimodalTokenizer") and not args.vocab_size:
        yield f"{found} --vocab-size: it has no tokens of its own; give their number"
    if kind in (*_FROM_FILE, "TikTokenizer", "HuggingFaceTokenizer") and not args.tokenizer_model:
        yield f"{found} --tokenizer-model: that is what it reads; give its file, or its folder"
    files = {"--vocab-file": args.vocab_file, "--merge-file": args.merge_file}
    if kind in _FROM_VOCABULARY and not args.vocab_file and find_spec("wget") is None:
        yield (
            f"{found} --vocab-file: Megatron would download one with the package wget, which is "
            "not installed; give --vocab-file, and for GPT2BPETokenizer --merge-file"
        )
    is_path = (args.tokenizer_model or "").startswith(("/", "./", "../", "~"))  # no name on a hub
    if kind in (*_FROM_FILE, "TikTokenizer") or is_path:
        files["--tokenizer-model"] = args.tokenizer_model
    for flag, file in files.items():
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
    length, positions = args.seq_length, args.max_position_embeddings
    if None not in (length, positions) and length > positions:
        yield (
            f"--seq-length {length} with --max-position-embeddings {positions}: it is the longest "
            f"sequence; give --max-position-embeddings {length}"
        )
    width = args.hidden_size
    if args.kv_channels is None and None not in (width, heads) and width % heads:
        yield (
            f"--hidden-size {width} with --num-attention-heads {heads}: heads are equally wide; "
            f"give a --hidden-size that {heads} divides, or --kv-channels, the width of a head"
        )
    if args.optimizer not in ("adam", "sgd") and find_spec("emerging_optimizers") is None:
        yield (
            f"--optimizer {args.optimizer}: it is in the package emerging-optimizers, which is "
            "not installed; install it, or give --optimizer adam"
        )
    if args.wandb_project and args.wandb_exp_name and find_spec("wandb") is None:
        yield (
            f"--wandb-project {args.wandb_project}: the package wandb is not installed; "
            "run pip install wandb, or drop it"
        )
    layout, layers = args.pipeline_model_parallel_layout, args.num_layers
    if layout and layers and (found := written_out(layout).count("t")) != layers:
        yield (
            f"--pipeline-model-parallel-layout {layout} with --num-layers {layers}: it has {found} "
            "layers, each written as a t; give the same number"
        )
    if args.recompute_granularity == "full" and args.recompute_method is None:
        yield (
            "--recompute-granularity full without --recompute-method: it tells which layers are "
            "recomputed together; give --recompute-method uniform --recompute-num-layers 1"
        )
    if args.rerun_mode == "report_stats":
        yield (
            "--rerun-mode report_stats: Megatron 0.19.2 has no mode of that name when it starts; "
            "give validate_results or disabled"
        )
    if args.num_workers < 0:
        yield f"--num-workers {args.num_workers}: it is a number of processes; give 0 or more"


def _data(args: Namespace) -> Iterator[str]:
    """Yield what is wrong with the sources of data."""
    parts = {
        f"--{name}-data-path": getattr(args, f"{name}_data_path")
        for name in ("train", "valid", "test")
    }
    sources = {
        "--mock-data": args.mock_data,
        "--data-path": args.data_path,
        "--data-args-path": args.data_args_path,
        next((flag for flag, path in parts.items() if path), ""): any(parts.values()),
        "--per-split-data-args-path": args.per_split_data_args_path,
    }
    given = [flag for flag, source in sources.items() if source]
    if len(given) > 1:
        yield f"{' with '.join(given)}: data come from one source; give one of them"
    elif args.split is not None and given and given[0] not in list(sources)[:3]:
        yield f"--split {args.split} with {given[0]}: it has its parts already; drop --split"
    if args.split is not None and not _is_split(args.split):
        yield (
            f"--split {args.split}: it is the shares of training, validation and test, three "
            "numbers at most; give 969,30,1, say"
        )


def data_problems(args: Namespace, *, may_mock: bool) -> Iterator[str]:
    """Yield one message where no flag names data, or ``--data-path`` those that this node lacks.

    Args:
        args: Megatron's namespace, as parsed.
        may_mock: whether the script also trains on ``--mock-data``.
    """
    prefixes = [word for word in args.data_path or () if not _is_weight(word) and "://" not in word]
    missing = [
        p for p in prefixes if not all(Path(f"{p}.{end}").is_file() for end in ("bin", "idx"))
    ]
    others = (
        *(args.mock_data, args.data_args_path, args.per_split_data_args_path),
        *(args.train_data_path, args.valid_data_path, args.test_data_path),
    )
    if missing or not (args.data_path or any(others)):
        yield no_data(missing, may_mock=may_mock)
        return
    for prefix in prefixes:
        with Path(f"{prefix}.idx").open("rb") as index:
            if index.read(len(_INDEX_HEADER)) != _INDEX_HEADER:
                yield (
                    f"--data-path {prefix}: {prefix}.idx does not begin as an index of Megatron's; "
                    "make it anew with scripts/prepare_data.py"
                )


def no_data(missing: Sequence[str], *, may_mock: bool) -> str:
    """Return the message about data that are not there, or that no flag names."""
    return (
        f"no data{' at ' if missing else ''}{', '.join(missing)}: --data-path takes the path "
        "of a .bin and an .idx file, without the ending; make them with "
        f"scripts/prepare_data.py{', or give --mock-data' if may_mock else ''}"
    )


def _is_weight(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _is_split(text: str) -> bool:
    """Return True if Megatron finds shares in a text: it looks for digits and points only."""
    try:
        shares = [float(share) for share in re.findall(r"[.0-9]+", text)]
    except ValueError:
        return False
    return 1 <= len(shares) <= 3 and sum(shares) > 0


def _length(args: Namespace) -> Iterator[str]:
    """Yield what is wrong with the numbers of iterations or samples."""
    if args.train_iters and args.train_samples:
        yield (
            f"--train-iters {args.train_iters} with --train-samples {args.train_samples}: both say "
            "how long to train; drop one of the two"
        )
        return
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
    """Yield what does not fit the number of ranks."""
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
    yield from _stocks_groups(args, replicas)
    if batch is None or args.micro_batch_size is None or args.decrease_batch_size_if_needed:
        return
    if batch % (at_once := args.micro_batch_size * replicas):
        yield (
            f"--global-batch-size {batch} with --micro-batch-size {args.micro_batch_size} and "
            f"{replicas} data-parallel {'replica' if replicas == 1 else 'replicas'}: each computes "
            f"equally many micro-batches; give a multiple of {at_once}"
        )


def _stocks_groups(args: Namespace, replicas: int) -> Iterator[str]:
    """Yield batches at which stock's schedule of several ``--segments`` would stop a run."""
    ranks, segments, size = args.pipeline_model_parallel_size, args.segments, args.micro_batch_size
    is_stocks = word_of(args).order == "stock" and segments not in (None, AUTO, 1)
    if not is_stocks or ranks == 1 or size is None:
        return
    found = f"--segments {segments} with --schedule stock"
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
