"""A script for Megatron as users have them, with its own flags, data and loss; it knows no fold3d.

`tests/end_to_end/test_own_script.py` applies the change of docs/quickstart.md to it.
"""

import re
from functools import partial

import torch
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args


def add_my_arguments(parser):
    group = parser.add_argument_group("mine")
    group.add_argument("--focus", type=float, default=2.0)
    group.add_argument("--freeze", default="(?!)", help="parameters, by chunk.name")
    group.add_argument("--data-period", type=int, default=7)
    return parser


class Periods(torch.utils.data.Dataset):
    """Sequences that count up, modulo a number."""

    def __init__(self, length, num_samples):
        self.length, self.num_samples = length, num_samples
        self.period = get_args().data_period

    def __len__(self):
        return self.num_samples

    def __getitem__(self, number):
        tokens = (torch.arange(self.length + 1) + number) % self.period
        return {"tokens": tokens[:-1], "labels": tokens[1:]}


def datasets(num_samples, vp_stage=None):
    return [Periods(get_args().seq_length, number) for number in num_samples]


def focal_loss(focus, losses):
    probabilities = torch.exp(-losses.float())
    loss = ((1 - probabilities) ** focus * losses).sum()
    num_tokens = torch.tensor(losses.numel(), dtype=torch.int, device=losses.device)
    return loss, num_tokens, {"focal loss": torch.stack([loss.detach(), num_tokens.float()])}


def forward_step(data_iterator, model):
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    stage = {"ignore_virtual": False, "vp_stage": vp_stage}
    tokens = positions = labels = None
    if mpu.is_pipeline_first_stage(**stage) or mpu.is_pipeline_last_stage(**stage):
        batch = next(data_iterator)
        tokens, labels = batch["tokens"].cuda(), batch["labels"].cuda()
        positions = torch.arange(tokens.shape[1]).cuda().expand_as(tokens)
    output = model(tokens, positions, None, labels=labels)
    return output, partial(focal_loss, get_args().focus)


def freeze(chunks):
    for number, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            if re.search(get_args().freeze, f"{number}.{name}"):
                parameter.requires_grad = False
    return chunks


if __name__ == "__main__":
    datasets.is_distributed = True
    args = parse_and_validate_args(
        extra_args_provider=add_my_arguments, args_defaults={"tokenizer_type": "NullTokenizer"}
    )
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    config.model.pre_wrap_hooks.append(freeze)
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)
