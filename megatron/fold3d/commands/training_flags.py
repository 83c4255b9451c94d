"""The flags of a training script for what the planner chose."""

from collections.abc import Iterator, Sequence
from shlex import quote

from megatron.fold3d.predict.cost_model.cluster import Cluster
from megatron.fold3d.predict.cost_model.model_shape import ModelShape
from megatron.fold3d.predict.cost_model.presets import SCRIPTS, shape_flags
from megatron.fold3d.predict.search.candidates import Candidate

_FP16 = ("--fp16", "--accumulate-allreduce-grads-in-fp32")  # the second comes with bf16 by itself


def check_trains(shape: ModelShape) -> None:
    """Return if one of the training scripts trains such a model.

    Raises:
        ValueError: none does.
    """
    if shape.family not in SCRIPTS:
        raise ValueError(f"{shape.name}: Megatron-core runs no encoder-decoder in a pipeline")


def training_flags(shape: ModelShape, cluster: Cluster, candidate: Candidate) -> str:
    """Return the flags for the model, the split and the schedule.

    Raises:
        ValueError: ``pretrain_gpt.py`` does not train such a model.
    """
    check_trains(shape)
    untied = ["--untie-embeddings-and-output-weights"] if shape.untied else []
    precision = () if candidate.setup.fp32 else ("--bf16",) if cluster.has_bf16 else _FP16
    flags = [*shape_flags(shape), *untied, *precision, *_split(candidate), *_schedule(candidate)]
    return " ".join(flags)


def _split(candidate: Candidate) -> Iterator[str]:
    """Yield the parallel sizes and the recomputation."""
    setup = candidate.setup
    yield f"--tensor-model-parallel-size {setup.tensor_parallel}"
    yield f"--pipeline-model-parallel-size {candidate.num_ranks}"
    yield f"--micro-batch-size {setup.microbatch_size}"
    batch_size = setup.microbatch_size * setup.data_parallel * candidate.num_microbatches
    yield f"--global-batch-size {batch_size}"
    if setup.sequence_parallel:
        yield "--sequence-parallel"
    if setup.recompute == "selective":
        yield "--recompute-activations"
    elif setup.recompute == "full":
        yield "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def _schedule(candidate: Candidate) -> Iterator[str]:
    """Yield the schedule, and what overlaps with it."""
    if candidate.layers:
        yield f"--pipeline-model-parallel-layout {_layout(candidate.layers)}"
    if not candidate.is_stock:
        yield f"--schedule {candidate.schedule}"
        if not candidate.layers:
            yield f"--segments {candidate.num_segments}"
    elif candidate.num_segments > 1:
        if not candidate.layers:
            yield f"--num-virtual-stages-per-pipeline-rank {candidate.num_segments}"
        yield "--overlap-p2p-communication-warmup-flush"  # or only its steady state overlaps
    if candidate.group_size not in (None, candidate.num_ranks):
        groups = "--microbatch-group-size-per-virtual-pipeline-stage"
        yield f"{groups} {candidate.group_size}"
    if candidate.setup.data_parallel > 1:  # or no DP.sync starts before the last backward
        yield "--overlap-grad-reduce"
    if candidate.setup.distributed_optimizer:
        yield "--use-distributed-optimizer --overlap-param-gather"
    if candidate.backward_share is not None:
        yield f"--backward-share {candidate.backward_share}"
    if candidate.delayed_weight_grads:  # Megatron's own linear layers are split, unfused
        yield f"--delay-weight-grads {candidate.delayed_segments}"
        yield "--transformer-impl local --no-gradient-accumulation-fusion"
    if candidate.preemptive:
        yield "--preemptive-comm"
    if candidate.offload:
        if candidate.setup.recompute == "none":  # all that a forward saves leaves then
            yield "--no-gradient-accumulation-fusion"
        yield "--offload-activations on"


def _layout(layers: Sequence[int]) -> str:
    """Spell the layers of each stage as Megatron does: ``Et*2|t*3|t*2L``, for a shell."""
    stages = [f"t*{count}" for count in layers]
    stages[0], stages[-1] = f"E{stages[0]}", f"{stages[-1]}L"
    return quote("|".join(stages))
