"""A script of Megatron-Bridge's for a small Llama, on CPUs; it knows no fold3d.

`tests/end_to_end/test_bridge.py` applies the change of docs/quickstart.md to it.
"""

import json
import sys

from megatron.bridge import AutoBridge
from megatron.bridge.models.gpt_provider import local_layer_spec
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    LoggerConfig,
    MockGPTDatasetConfig,
    OptimizerConfig,
    RNGConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from transformers import LlamaConfig

LLAMA = LlamaConfig(
    architectures=["LlamaForCausalLM"],
    num_hidden_layers=8,
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
    max_position_embeddings=16,
)
OF_CPU = {
    "transformer_layer_spec": local_layer_spec,
    "use_cpu_initialization": True,
    **dict.fromkeys(
        (
            *("masked_softmax_fusion", "bias_activation_fusion", "bias_dropout_fusion"),
            *("apply_rope_fusion", "gradient_accumulation_fusion", "persist_layer_norm"),
            "cross_entropy_loss_fusion",
        ),
        False,
    ),
}


def configuration():
    return ConfigContainer(
        model=AutoBridge.from_hf_config(LLAMA).to_megatron_provider(load_weights=False),
        train=TrainingConfig(train_iters=10, global_batch_size=4, micro_batch_size=1),
        validation=ValidationConfig(eval_interval=4, eval_iters=1),
        optimizer=OptimizerConfig(optimizer="adam", lr=1e-2, min_lr=1e-3, clip_grad=1.0),
        scheduler=SchedulerConfig(
            lr_decay_style="cosine", lr_warmup_iters=2, start_weight_decay=0.1, end_weight_decay=0.1
        ),
        ddp=DistributedDataParallelConfig(),
        dataset=MockGPTDatasetConfig(
            random_seed=1,
            reset_attention_mask=False,
            reset_position_ids=False,
            eod_mask_loss=False,
            seq_length=16,
            dataloader_type="single",
            num_workers=0,
            persistent_workers=False,
            pin_memory=False,
        ),
        logger=LoggerConfig(log_interval=1),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=63),
        checkpoint=CheckpointConfig(),
        rng=RNGConfig(seed=1),
        dist=DistributedInitConfig(distributed_backend="gloo"),
    )


if __name__ == "__main__":
    config = configuration()
    changes = {"model": {**OF_CPU, "seq_length": 16, "pipeline_model_parallel_size": 2}}
    for part, values in (*changes.items(), *json.loads(sys.argv[1]).items()):
        for name, value in values.items():
            setattr(getattr(config, part, config), name, value)
    pretrain(config, forward_step)
