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
        own: words that say what the planner does not decide, in place of the shape's flags.

    Raises:
        ValueError: ``pretrain_gpt.py`` does not train such a model.
    """
    check_trains(shape)
    sixteen_bits = _FP16 if fp16 or not cluster.has_bf16 else _BF16
    precision = sixteen_bits[candidate.setup.small_gradients]
    if candidate.setup.fp32:
        precision = ""
    flags = [
        *map(quote, shape_flags(shape) if own is None else own),
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


def undecided(words: Iterable[str]) -> Iterator[str]:
    """Yield a user's flags with their values, without those that the planner decides."""
    return without(words, CHOSEN | _REPEATED)


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
    setup = candidate.setup
    yield f"--tensor-model-parallel-size {setup.tensor_parallel}"
    yield f"--pipeline-model-parallel-size {candidate.num_ranks}"
    if setup.order == "tp-pp-dp":
        yield "--use-tp-pp-dp-mapping"
    yield f"--micro-batch-size {setup.microbatch_size}"
    batch_size = setup.microbatch_size * setup.data_parallel * candidate.num_microbatches
    yield f"--global-batch-size {batch_size}"
    if setup.context_parallel > 1:
        yield f"--context-parallel-size {setup.context_parallel}"
    if setup.expert_parallel > 1:
        yield f"--expert-model-parallel-size {setup.expert_parallel}"
    if setup.expert_tensor_parallel:
        yield f"--expert-tensor-parallel-size {setup.expert_tensor_parallel}"
    if setup.sequence_parallel:
        yield "--sequence-parallel"
    if setup.local_layers:
        yield "--transformer-impl local"
    if setup.asked_recompute == "selective":
        yield "--recompute-activations"
    elif candidate.recompute_layers:
        yield f"--recompute-layers {','.join(map(str, candidate.recompute_layers))}"
    elif setup.recompute == "full":
        yield "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def _schedule(candidate: Candidate) -> Iterator[str]:
    """Yield the schedule, and what overlaps with it."""
    if candidate.layers:
        yield f"--pipeline-model-parallel-layout {quote(layout_of(candidate.layers))}"
    choice = candidate.choice
    if choice.group is not None and choice.order != "interleaved":  # stock's, or where auto begins
        yield f"--microbatch-group-size-per-virtual-pipeline-stage {choice.group}"
        choice = replace(choice, group=None)
    if not candidate.is_stock:
        yield f"--schedule {choice}"
        if not candidate.layers:
            yield f"--segments {candidate.num_segments}"
    elif candidate.num_segments > 1:
        if not candidate.layers:
            yield f"--num-virtual-stages-per-pipeline-rank {candidate.num_segments}"
        yield "--overlap-p2p-communication-warmup-flush"  # or only its steady state overlaps
    if candidate.combined:
        yield "--overlap-moe-expert-parallel-comm"
    if candidate.setup.num_replicas > 1:  # or no DP.sync starts before the last backward
        yield "--overlap-grad-reduce"
    if candidate.setup.distributed_optimizer:
        yield "--use-distributed-optimizer --overlap-param-gather"
    if candidate.setup.gathered_bits:
        yield "--delta-param-gather auto"
    if (instances := candidate.setup.optimizer_instances) > 1:
        yield f"--num-distributed-optimizer-instances {instances}"
    if not candidate.aligned:
        yield "--no-align-grad-reduce"
    if candidate.shards != "off":
        yield f"--shard-segments {candidate.shards}"
    if choice.pairs:  # run without dropout, and only Megatron's own layers hand over
        if candidate.setup.tensor_parallel > 1:
            yield "--transformer-impl local"
        yield "--attention-dropout 0 --hidden-dropout 0"
    if candidate.setup.expert_parallel > 1 and (candidate.combined or choice.pairs):
        yield "--moe-token-dispatcher-type alltoall"
    if candidate.preemptive:
        yield "--preemptive-comm"
    if candidate.offload:
        if candidate.setup.asked_recompute == "none":  # all that a forward saves leaves then
            yield "--no-gradient-accumulation-fusion"
        yield "--offload-activations on"


def layout_of(layers: Sequence[int]) -> str:
    """Spell the layers of each stage as Megatron does: ``Et*2|t*3|t*2L``."""
    stages = [f"t*{count}" if count else "" for count in layers]
    stages[0], stages[-1] = f"E{stages[0]}", f"{stages[-1]}L"
    return "|".join(stages)
