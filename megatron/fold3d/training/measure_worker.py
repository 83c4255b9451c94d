"""Measure a run's hardware, in one process per rank that is not the rank's own.

``python -m megatron.fold3d.training.measure_worker PARENT FILE DEFAULTS ...``, with Megatron's
flags, and perhaps a script's own among them; the parent is the rank's process id, the defaults are
an object in JSON, of attributes that no flag sets. These processes make the job's process groups,
compute a layer of its model, send its messages, and are gone: the job itself has not yet made a
group, drawn a random number or taken a byte of the GPU's memory.
"""

import json
import logging
import math
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.fold3d.config.all_flags import add_arguments, megatron_defaults
from megatron.fold3d.policy.grad_sync_cuts import rings_are_buffered
from megatron.fold3d.predict.cost_model.hardware_profile import HardwareProfile
from megatron.fold3d.runtime.agreement import slowest
from megatron.fold3d.runtime.measure import lanes, timing
from megatron.fold3d.training.leaving import end_with_parent, meeting_point

_CHANGED = {
    # What would leave something behind, or read it.
    "tensorboard_dir": None,
    "wandb_project": "",
    "save": None,
    "load": None,
    # One layer on each rank, as large as the others, and a head with weights of its own.
    "encoder_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "mtp_num_layers": None,
    "untie_embeddings_and_output_weights": True,
}


def main(argv: Sequence[str]) -> int:
    """Measure, and write what was found to the file that is named first, on rank 0."""
    parent, file, defaults, *flags = argv
    end_with_parent(int(parent))
    sys.argv[1:] = flags  # where Megatron reads them
    logging.disable(logging.INFO)
    with ExitStack() as patched:
        args = _start_megatron(patched, json.loads(defaults))
        measured = _measure(args, torch.device(args.device))
        if dist.get_rank() == 0:
            Path(file).write_text(measured.to_json(), encoding="utf-8")
        dist.barrier()  # a rank that leaves early would break the groups of the others
        dist.destroy_process_group()
    return 0


def _start_megatron(patched: ExitStack, defaults: dict[str, Any]) -> Namespace:
    """Validate the flags and make the process groups, as a run does before it builds its model."""
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.global_vars import set_global_variables
    from megatron.training.initialize import initialize_megatron

    import fold3d_patches

    args: Namespace = parse_args(add_arguments, ignore_unknown_args=True)
    not_given = {name: defaults[name] for name in defaults if getattr(args, name, None) is None}
    vars(args).update(not_given)
    vars(args).update(_CHANGED, num_layers=args.pipeline_model_parallel_size)
    patched.enter_context(fold3d_patches.install_platform(args.device))
    validate_args(args, megatron_defaults(args))
    set_global_variables(args)
    initialize_megatron(store=meeting_point("groups"), allow_no_cuda=args.device == "cpu")
    return args


def _measure(args: Namespace, device: torch.device) -> HardwareProfile:
    from megatron.core.pipeline_parallel.schedules import get_tensor_shapes
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron.fold3d.upstream.pretrain import GPTModelBuilder, gpt_config_from_args

    groups, built = ProcessGroupCollection.use_mpu_process_groups(), gpt_config_from_args(args)
    dtype = built.transformer.params_dtype
    (shape,) = get_tensor_shapes(
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        decoder_seq_length=None,
        config=built.transformer,
        tp_group=groups.tp,
        cp_group=groups.cp,
    )
    builder = GPTModelBuilder(built)
    layer, first, last = (
        builder.build_model(groups, pre_process=is_first, post_process=is_last).to(device, dtype)
        for is_first, is_last in ((False, False), (True, False), (False, True))
    )
    positions = torch.arange(args.seq_length // args.context_parallel_size, device=device)
    tokens = (positions % args.padded_vocab_size).repeat(args.micro_batch_size, 1)
    found = [
        *_forward_and_backward(layer, shape, dtype, device),
        *_forward_and_backward(first, shape, dtype, device, tokens=tokens),
        *_forward_and_backward(last, shape, dtype, device, labels=tokens),
    ]
    layer_forward_s, layer_backward_s, *others = slowest(found, device)
    first_forward_s, first_backward_s, last_forward_s, last_backward_s = others
    element_bytes = 4 if args.accumulate_allreduce_grads_in_fp32 else dtype.itemsize
    layer_bytes, last_bytes = (
        element_bytes * sum(p.numel() for p in model.parameters()) for model in (layer, last)
    )
    hidden_bytes = math.prod(shape) * dtype.itemsize
    message = lanes.transfers(groups.pp, hidden_bytes, device)
    grad_sync = lanes.all_reduces(groups.dp_cp, last_bytes, device)
    return HardwareProfile(
        layer_forward_s=layer_forward_s,
        layer_backward_s=layer_backward_s,
        head_forward_s=max(0.0, last_forward_s - layer_forward_s),
        head_backward_s=max(0.0, last_backward_s - layer_backward_s),
        embedding_forward_s=max(0.0, first_forward_s - layer_forward_s),
        embedding_backward_s=max(0.0, first_backward_s - layer_backward_s),
        message_s=message.s_per_byte * hidden_bytes,
        message_latency_s=message.latency_s,
        grad_sync_s_per_byte=grad_sync.s_per_byte,
        grad_sync_latency_s=grad_sync.latency_s,
        layer_gradient_bytes=layer_bytes,
        head_gradient_bytes=last_bytes - layer_bytes,
        rings_are_buffered=rings_are_buffered(hidden_bytes, dist.get_backend(groups.dp_cp)),
    )


def _forward_and_backward(
    model: Any,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    tokens: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
) -> tuple[float, float]:
    """Return the seconds of one micro-batch's forward, and of its backward.

    Args:
        model: a layer, with the embedding or the head if it is to have them.
        tokens: the tokens of the micro-batch, sequences by positions, for the embedding.
    """
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # fusions add here
    hidden = torch.zeros(tuple(shape), dtype=dtype, device=device, requires_grad=True)

    def forward() -> torch.Tensor:
        model.set_input_tensor(hidden)
        output: torch.Tensor = model(tokens, tokens, None, labels=labels)
        return output

    def both() -> None:
        output = forward()
        output.backward(torch.ones_like(output))

    forward_s = timing.seconds(forward, device)
    return forward_s, max(0.0, timing.seconds(both, device) - forward_s)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
