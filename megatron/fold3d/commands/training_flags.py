"""The flags of a training script for what the planner chose."""

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from shlex import quote

from megatron.fold3d.predict.cost_model.cluster import Cluster
from megatron.fold3d.predict.cost_model.model_shape import ModelShape
from megatron.fold3d.predict.cost_model.presets import SCRIPTS, shape_flags
from megatron.fold3d.predict.cost_model.sizes import Setup
from megatron.fold3d.predict.search.candidates import Candidate

LOCAL_FP32 = "--ddp-param-name-patterns-for-fp32-local-accumulation"
SCATTER_FP32 = "--ddp-reduce-scatter-with-fp32-accumulation"
# With gradients of 32 bits, which are bf16's default, and of 16.
_FP16 = ("--fp16 --accumulate-allreduce-grads-in-fp32", "--fp16")
_BF16 = ("--bf16", "--bf16 --grad-reduce-in-bf16")
# What the user decides, and an answer repeats.
_REPEATED = frozenset(
    (
        *("bf16", "fp16", "fp32", "accumulate-allreduce-grads-in-fp32", "grad-reduce-in-bf16"),
        *(LOCAL_FP32[2:], SCATTER_FP32[2:], "global-batch-size"),
    )
)
CHOSEN = frozenset(
    (
        *("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size"),
        *("expert-model-parallel-size", "expert-tensor-parallel-size", "use-tp-pp-dp-mapping"),
        *("micro-batch-size", "sequence-parallel"),
        *("recompute-activations", "recompute-granularity", "recompute-method"),
        *("recompute-num-layers", "recompute-modules", "recompute-layers"),
        *("pipeline-model-parallel-layout", "num-virtual-stages-per-pipeline-rank"),
        *("num-layers-per-virtual-pipeline-stage", "decoder-first-pipeline-num-layers"),
        *("decoder-last-pipeline-num-layers", "account-for-embedding-in-pipeline-split"),
        *("account-for-loss-in-pipeline-split", "overlap-p2p-communication-warmup-flush"),
        *("microbatch-group-size-per-virtual-pipeline-stage", "overlap-grad-reduce"),
        *("use-distributed-optimizer", "overlap-param-gather", "no-align-grad-reduce"),
        "num-distributed-optimizer-instances",
        *("schedule", "segments", "shard-segments", "preemptive-comm", "offload-activations"),
        *("model", "tp", "pp", "dp", "microbatches", "layers", "recompute"),
    )
)
"""What the planner decides, in the flags of Megatron and of ours."""


def check_trains(shape: ModelShape) -> None:
    """Return if one of the training scripts trains such a model.

    Raises:
        ValueError: none does.
    """
    if shape.family not in SCRIPTS:
        raise ValueError(f"{shape.name}: Megatron-core runs no encoder-decoder in a pipeline")


def training_flags(
    shape: ModelShape,
    cluster: Cluster,
    candidate: Candidate,
    *,
    fp16: bool = False,
    own: Sequence[str] | None = None,
) -> str:
    """Return the flags for the model, the split and the schedule.

    Args:
        fp16: whether fp16 is the 16-bit type although the cluster has bf16.
        own: a user's words in place of the shape's flags; those that the planner decides are left
            out.

    Raises:
        ValueError: ``pretrain_gpt.py`` does not train such a model.
    """
    check_trains(shape)
    sixteen_bits = _FP16 if fp16 or not cluster.has_bf16 else _BF16
    precision = sixteen_bits[candidate.setup.small_gradients]
    if candidate.setup.fp32:
        precision = ""
    flags = [
        *map(quote, shape_flags(shape) if own is None else without(own, CHOSEN | _REPEATED)),
        *precision.split(),
        *sums_of(candidate.setup),
        *_split(candidate),
        *_schedule(candidate),
    ]
    return " ".join(flags)


def sums_of(setup: Setup) -> Iterator[str]:
    """Yield the flags that say which sums of small gradients are of 32 bits."""
    if setup.accumulates_in_fp32:
        yield f"{LOCAL_FP32} all"
    if setup.scatters_in_fp32 and setup.distributed_optimizer:
        yield SCATTER_FP32


def without(words: Iterable[str], names: Container[str]) -> Iterator[str]:
    """Yield flags with their values, without those of these names."""
    return (word for name, word in _by_flag(words) if name not in names)


def to_drop(words: Iterable[str], flags: str) -> Iterable[str]:
    """Return the names of flags in a script that the planner decides and has not in ``flags``."""
    own = (CHOSEN | _REPEATED) - {name for name, _ in _by_flag(flags.split())}
    return dict.fromkeys(f"--{name}" for name, _ in _by_flag(words) if name in own)


def _by_flag(words: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each word with the name of the flag that it is, or is a value of."""
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word[2:].partition("=")[0]
        yield name, word


def _split(candidate: Candidate) -> Iterator[str]:
    """Yield the parallel sizes and the recomputation."""
    setup, counts = candidate.setup, candidate.recompute_layers
    batch_size = setup.microbatch_size * setup.data_parallel * candidate.num_microbatches
    of_experts, selective = setup.expert_tensor_parallel, setup.asked_recompute == "selective"
    flags = {
        f"--tensor-model-parallel-size {setup.tensor_parallel}": True,
        f"--pipeline-model-parallel-size {candidate.num_ranks}": True,
        "--use-tp-pp-dp-mapping": setup.order == "tp-pp-dp",
        f"--micro-batch-size {setup.microbatch_size}": True,
        f"--global-batch-size {batch_size}": True,
        f"--context-parallel-size {setup.context_parallel}": setup.context_parallel > 1,
        f"--expert-model-parallel-size {setup.expert_parallel}": setup.expert_parallel > 1,
        f"--expert-tensor-parallel-size {of_experts}": of_experts,
        "--sequence-parallel": setup.sequence_parallel,
        "--transformer-impl local": setup.local_layers,
        "--recompute-activations": selective,
        f"--recompute-layers {','.join(map(str, counts))}": counts and not selective,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1": (
            setup.recompute == "full" and not (counts or selective)
        ),
    }
    yield from (flag for flag, given in flags.items() if given)


def _schedule(candidate: Candidate) -> Iterator[str]:
    """Yield the schedule, and what overlaps with it."""
    c, setup, choice = candidate, candidate.setup, candidate.choice
    in_groups = choice.group is not None and choice.order != "interleaved"  # stock's, or auto's
    word = replace(choice, group=None) if in_groups else choice
    layout = c.layers and quote(layout_of(c.layers))
    segments, instances = c.num_segments, setup.optimizer_instances
    virtual = c.is_stock and segments > 1
    flags = {
        f"--pipeline-model-parallel-layout {layout}": layout,
        f"--microbatch-group-size-per-virtual-pipeline-stage {choice.group}": in_groups,
        f"--schedule {word}": not c.is_stock,
        f"--segments {segments}": not (c.is_stock or layout),
        f"--num-virtual-stages-per-pipeline-rank {segments}": virtual and not layout,
        "--overlap-p2p-communication-warmup-flush": virtual,  # or only its steady state overlaps
        "--overlap-moe-expert-parallel-comm": c.combined,
        "--overlap-grad-reduce": setup.num_replicas > 1,  # or DP.sync starts after all backwards
        "--use-distributed-optimizer --overlap-param-gather": setup.distributed_optimizer,
        " ".join(setup.coding_flags): setup.coding_flags,
        f"--num-distributed-optimizer-instances {instances}": instances > 1,
        "--no-align-grad-reduce": not c.aligned,
        f"--shard-segments {c.shards}": c.shards != "off",
        # Pairs run without dropout, and only Megatron's own layers hand over.
        "--transformer-impl local": choice.pairs and setup.tensor_parallel > 1,
        "--attention-dropout 0 --hidden-dropout 0": choice.pairs,
        "--moe-token-dispatcher-type alltoall": (
            setup.expert_parallel > 1 and (c.combined or choice.pairs)
        ),
        "--preemptive-comm": c.preemptive,
        # Without recomputation all that a forward saves leaves.
        "--no-gradient-accumulation-fusion": c.offload and setup.asked_recompute == "none",
        "--offload-activations on": c.offload,
    }
    yield from (flag for flag, given in flags.items() if given)


def layout_of(layers: Sequence[int]) -> str:
    """Spell the layers of each stage as Megatron does: ``Et*2|t*3|t*2L``."""
    stages = [f"t*{count}" if count else "" for count in layers]
    stages[0], stages[-1] = f"E{stages[0]}", f"{stages[-1]}L"
    return "|".join(stages)
