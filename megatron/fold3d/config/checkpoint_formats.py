"""Refuse options whose state Megatron 0.19.2 cannot save, or cannot load after saving.

Megatron itself fails only when it saves or resumes, and then the run's work is lost.
"""

from argparse import Namespace
from collections.abc import Iterator


def format_problems(args: Namespace) -> Iterator[str]:
    """Yield one message (found, rule, fix) per option whose state would be lost."""
    saves = args.save is not None and not args.no_save_optim
    loads = args.load is not None and not (args.no_load_optim or args.finetune or args.skip_train)
    if args.optimizer == "sgd":
        if args.use_distributed_optimizer and not args.optimizer_cpu_offload:
            yield (
                "--optimizer sgd with --use-distributed-optimizer: Megatron 0.19.2 shards the "
                "state of Adam only; drop one of the two"
            )
        if args.ckpt_format == "torch_dist" and (saves or loads):
            flag, verb = ("--save", "save") if saves else ("--load", "load")
            yield (
                f"--optimizer sgd with {flag} and --ckpt-format torch_dist: Megatron 0.19.2 "
                "writes its momentum in this format and cannot load it again; give --ckpt-format "
                f"torch, or --no-{verb}-optim"
            )
    flag = "--save" if args.save is not None else "--load" if args.load is not None else ""
    tied = not args.untie_embeddings_and_output_weights
    shared = args.mtp_num_layers and tied and args.pipeline_model_parallel_size > 1
    if flag and shared and args.ckpt_format == "torch_dist":
        yield (
            f"--mtp-num-layers {args.mtp_num_layers} with {flag} and --ckpt-format torch_dist: "
            "Megatron 0.19.2 has no name there for an embedding that the last of several pipeline "
            "ranks shares; give --untie-embeddings-and-output-weights, or --ckpt-format torch"
        )
    if args.ckpt_step and loads and args.use_distributed_optimizer and args.ckpt_format == "torch":
        yield (
            f"--ckpt-step {args.ckpt_step} with --use-distributed-optimizer and --ckpt-format "
            "torch: Megatron 0.19.2 takes the weights from this iteration, and the optimizer's "
            f"state from the last one; write {args.ckpt_step} into "
            "latest_checkpointed_iteration.txt there and drop --ckpt-step, or give --no-load-optim"
        )
