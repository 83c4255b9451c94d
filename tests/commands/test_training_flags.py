import shlex

import pytest

from megatron.fold3d.commands.training_flags import layout_of, training_flags
from megatron.fold3d.config.fold3d_config import Fold3DConfig
from megatron.fold3d.config.schedule_flags import group_of
from megatron.fold3d.predict.cost_model.cluster import cluster
from megatron.fold3d.predict.cost_model.model_shape import model_shape
from megatron.fold3d.predict.cost_model.sizes import Setup
from megatron.fold3d.predict.search.candidates import Candidate


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("layers", [(), (6, *(5,) * 6, 4)])
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("1f1b", {}),
        ("interleaved", {"group_size": 4}),
        ("interleaved", {"group_size": 8}),
        ("interleaved", {"group_size": 8, "is_stock": False}),
        ("aiao", {}),
        ("aiao", {"distributed_optimizer": True}),
        ("aiao", {"backward_share": 0.7}),
        ("aiao", {"offload": True, "preemptive": True}),
        ("aiao", {"backward_share": 0.7, "delayed_weight_grads": (1,)}),
    ],
)
def test_pretrain_gpt_accepts_every_flag_that_is_emitted(
    parser, schedule, options, layers, recompute
):
    segments = 1 if schedule == "1f1b" else 2
    options = {"is_stock": schedule != "aiao", **options}
    sharded = options.pop("distributed_optimizer", False)
    setup = Setup(
        tensor_parallel=8,
        data_parallel=2,
        microbatch_size=4,
        sequence_parallel=True,
        distributed_optimizer=sharded,
        recompute=recompute,
    )
    candidate = Candidate(
        schedule=schedule,
        setup=setup,
        num_ranks=4,
        num_segments=segments,
        num_microbatches=8,
        layers=layers if segments == 2 else (),
        **options,
    )
    flags = training_flags(model_shape("gpt3-18b"), cluster("a100x64"), candidate)
    args = parser.parse_args(shlex.split(flags))
    config = Fold3DConfig.from_args(args)
    assert config.choice.order == ("stock" if candidate.is_stock else schedule)
    assert (config.num_ranks, config.num_segments) == (4, segments)
    assert args.global_batch_size == 2 * 4 * 8
    assert args.overlap_grad_reduce
    assert args.use_distributed_optimizer == sharded
    assert config.choice.share == options.get("backward_share")
    assert config.apart == candidate.delayed_weight_grads
    assert config.preemptive_comm == candidate.preemptive
    assert config.offload_activations == ("on" if candidate.offload else "off")
    assert group_of(args) == (8 if options.get("group_size") == 8 else None)


def test_layers_are_spelled_as_megatron_reads_them():
    from megatron.core.transformer.pipeline_parallel_layer_layout import (
        PipelineParallelLayerLayout,
    )

    spelled = layout_of((6, 5, 5, 4))
    found = PipelineParallelLayerLayout.from_str(spelled, pipeline_model_parallel_size=2)
    assert [[len(s) for s in rank] for rank in found.layout] == [[7, 5], [5, 5]]
