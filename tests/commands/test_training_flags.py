import shlex
from dataclasses import replace

import pytest

from megatron.fold3d.commands.training_flags import layout_of, training_flags
from megatron.fold3d.config.read_config import read_config
from megatron.fold3d.config.schedule_flags import group_of
from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.predict.cost_model.cluster import cluster
from megatron.fold3d.predict.cost_model.model_shape import model_shape
from megatron.fold3d.predict.cost_model.sizes import Setup
from megatron.fold3d.predict.search.candidates import Candidate, candidates


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("layers", [(), (6, *(5,) * 6, 4)])
@pytest.mark.parametrize(
    ("word", "segments", "options"),
    [
        ("stock", 1, {}),
        ("stock", 2, {}),
        ("stock:group=8", 2, {}),
        ("interleaved:group=8", 2, {}),
        ("aiao", 2, {}),
        ("aiao", 2, {"distributed_optimizer": True}),
        ("aiao:step=next:share=0.7", 2, {}),
        ("aiao", 2, {"offload": True, "preemptive": True}),
        ("aiao:step=next:wgrad=last@1:share=0.7", 2, {}),
    ],
)
def test_pretrain_gpt_accepts_every_flag_that_is_emitted(
    parser, word, segments, options, layers, recompute
):
    options = {**options}
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
        choice=Choice.parse(word, segments),
        setup=setup,
        num_ranks=4,
        num_microbatches=8,
        layers=layers if segments == 2 else (),
        **options,
    )
    flags = training_flags(model_shape("gpt3-18b"), cluster("a100x64"), candidate)
    args = parser.parse_args(shlex.split(flags))
    config = read_config(args)
    assert config.choice.order == candidate.choice.order
    assert (config.num_ranks, config.num_segments) == (4, segments)
    assert args.global_batch_size == 2 * 4 * 8
    assert args.overlap_grad_reduce
    assert args.use_distributed_optimizer == sharded
    assert replace(config.choice, group=candidate.choice.group) == candidate.choice
    assert config.preemptive_comm == candidate.preemptive
    assert config.offload_activations == ("on" if candidate.offload else "off")
    assert group_of(args) == candidate.choice.group


def test_layers_are_spelled_as_megatron_reads_them():
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    spelled = layout_of((6, 5, 5, 4))
    found = PipelineParallelLayerLayout.from_str(spelled, pipeline_model_parallel_size=2)
    assert [[len(s) for s in rank] for rank in found.layout] == [[7, 5], [5, 5]]


def test_attention_of_transformer_engine_is_not_asked_to_recompute():
    model, gpus = model_shape("gpt3-18b"), cluster("a100x128")
    setup = Setup(tensor_parallel=8, data_parallel=4, recompute="selective")
    engine = Candidate(
        choice=Choice.plain("aiao", 2), setup=setup, num_ranks=4, num_microbatches=16
    )
    local = replace(engine, setup=replace(setup, local_layers=True, keeps_scores=True))
    assert "recompute" not in training_flags(model, gpus, engine)
    found = training_flags(model, gpus, local)
    assert "--transformer-impl local" in found
    assert "--recompute-activations" in found
    asked = [c.setup.recompute for c in candidates(model, gpus, 64, {"num_ranks": 4})]
    assert set(asked) == {"selective", "full"}
