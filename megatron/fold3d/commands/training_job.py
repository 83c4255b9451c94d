"""Training flags behind ``--``, as the options of ``fold3d simulate``.

    fold3d simulate --cluster a100x16-100g -- --num-layers 24 ... --schedule aiao:step=next

The flags say the model, the sizes and the schedule, so that the command's own options for these are
refused beside them. No Megatron is needed: flags are read as words.
"""

from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron.fold3d.commands.megatron_flags import Described, given_training, number
from megatron.fold3d.config.recompute_flags import counts_or_auto
from megatron.fold3d.config.schedule_flags import WORD_DEFAULTS, attributes_of
from megatron.fold3d.policy.schedule_word import STOCK, Word
from megatron.fold3d.predict.cost_model.cluster import cluster
from megatron.fold3d.predict.cost_model.model_shape import ModelShape
from megatron.fold3d.predict.cost_model.sizes import Recompute, Setup

_SAID = (
    *("schedule", "plan_file", "pp", "segments", "microbatches", "shard_segments", "grad_sync"),
    *("recompute_layers", "model", "tp", "dp", "micro_batch_size", "recompute", "fp32"),
    *("distributed_optimizer", "grad_reduce_in_bf16", "use_tp_pp_dp_mapping"),
)
_CHUNKS = ("segments", "num-virtual-stages-per-pipeline-rank")
_LEFT_OUT = (
    *("lazy-inter-segment", "optimizer-cpu-offload", "fp8-format", "fp4-format"),
    *("pipeline-model-parallel-layout", "decoder-first-pipeline-num-layers"),
    *("decoder-last-pipeline-num-layers", "offload-activations", "recompute-modules"),
    "num-distributed-optimizer-instances",
)


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """What training flags say beside a schedule and its sizes.

    Attributes:
        shape: the model.
        setup: how it is trained.
        left_out: flags that change time or memory, and that a simulation ignores.
    """

    shape: ModelShape
    setup: Setup
    left_out: tuple[str, ...]


def with_training_flags(args: Namespace) -> Namespace:
    """Return the options that stand for the training flags of ``args``, if there are any.

    Raises:
        ValueError: flags are missing or not modelled, or say what an option says too.
    """
    if not args.flags and args.from_script is None:
        if args.schedule is None and args.plan_file is None:
            raise ValueError("no --schedule, and no training flags behind --: give one of the two")
        return Namespace(**vars(args) | {"job": None})
    if said := [name for name in _SAID if getattr(args, name, None) is not None]:
        flag = "--" + said[0].replace("_", "-")
        raise ValueError(f"{flag} beside training flags, which say it; drop it")
    if args.cluster is None:
        raise ValueError("training flags without --cluster: it says which GPUs; give --cluster")
    about = given_training(args)
    flags = about.flags
    ranks = number(flags, "pipeline-model-parallel-size", 1)
    setup = _setup(flags, about, cluster(args.cluster).num_gpus, ranks)
    batch = setup.microbatch_size * setup.data_parallel
    if about.global_batch_size % batch or not about.global_batch_size:
        raise ValueError(
            f"--global-batch-size {about.global_batch_size} with --micro-batch-size "
            f"{setup.microbatch_size} on {setup.data_parallel} replicas: each computes equally "
            f"many micro-batches; give a multiple of {batch}"
        )
    segments = next((number(flags, name) for name in _CHUNKS if name in flags), 1)
    options = {
        "pp": ranks,
        "segments": segments,
        "microbatches": about.global_batch_size // batch,
        "model": about.shape.name,
        "shard_segments": None
        if flags.get("shard-segments") == "off"
        else flags.get("shard-segments"),
        "preemptive_comm": "preemptive-comm" in flags,
        "recompute_layers": _counts(flags),
        "grad_sync": None if _overlaps(flags, setup) else "serial",
        "job": TrainingJob(about.shape, setup, (*_left_out(flags, setup),)),
    }
    return Namespace(**vars(args) | WORD_DEFAULTS | _schedule(flags, segments) | options)


def _schedule(flags: Mapping[str, str], segments: int) -> dict[str, object]:
    """Return the attributes of the word, where Megatron's own schedule may have groups."""
    word = Word.parse(flags.get("schedule", STOCK))
    found = attributes_of(word)
    name = "microbatch-group-size-per-virtual-pipeline-stage"
    if name in flags and segments > 1:
        found |= {"schedule_group": number(flags, name)}
    return found


def _setup(flags: Mapping[str, str], about: Described, gpus: int, ranks: int) -> Setup:
    tensor = number(flags, "tensor-model-parallel-size", 1)
    model = tensor * ranks * about.context_parallel
    if gpus % model:
        raise ValueError(
            f"the training flags take {model} GPUs for a model, and the cluster has {gpus}; give a "
            "cluster of a multiple"
        )
    return Setup(
        tensor_parallel=tensor,
        data_parallel=gpus // model,
        microbatch_size=number(flags, "micro-batch-size", 1),
        sequence_parallel="sequence-parallel" in flags,
        distributed_optimizer="use-distributed-optimizer" in flags,
        recompute=_recompute(flags),
        order="tp-pp-dp" if "use-tp-pp-dp-mapping" in flags else "tp-dp-pp",
        fp32=about.fp32,
        context_parallel=about.context_parallel,
        expert_parallel=about.expert_parallel,
        expert_tensor_parallel=about.expert_tensor_parallel,
        small_gradients=about.small_gradients,
        accumulates_in_fp32=about.accumulates_in_fp32,
        scatters_in_fp32=about.scatters_in_fp32,
        local_layers=_has_local_layers(flags),
    )


def _has_local_layers(flags: Mapping[str, str]) -> bool:
    return flags.get("transformer-impl") == "local"


def _recompute(flags: Mapping[str, str]) -> Recompute:
    """Return what is recomputed; fused attention keeps no scores, as selective recomputation."""
    if "recompute-layers" in flags or flags.get("recompute-granularity") == "full":
        return "full"
    selective = "recompute-activations" in flags or "recompute-granularity" in flags
    return "selective" if selective or not _has_local_layers(flags) else "none"


def _counts(flags: Mapping[str, str]) -> tuple[int, ...] | str | None:
    try:
        return counts_or_auto(flags["recompute-layers"]) if "recompute-layers" in flags else None
    except ArgumentTypeError as error:
        raise ValueError(f"--recompute-layers: {error}") from None


def _overlaps(flags: Mapping[str, str], setup: Setup) -> bool:
    return "overlap-grad-reduce" in flags or setup.num_replicas == 1


def _left_out(flags: Mapping[str, str], setup: Setup) -> Iterator[str]:
    yield from (f"--{name}" for name in _LEFT_OUT if flags.get(name, "off") != "off")
    if setup.distributed_optimizer and "overlap-param-gather" not in flags:
        yield "no --overlap-param-gather"
    if flags.get("recompute-num-layers", "1") != "1":
        yield "--recompute-num-layers"
    if flags.get("optimizer", "adam") != "adam":
        yield "--optimizer"
