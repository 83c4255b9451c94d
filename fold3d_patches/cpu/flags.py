"""What ``--device cpu`` means in Megatron's flags: those it stands for, and those it excludes."""

from argparse import Namespace

from megatron.fold3d.config.settings import asked

# They go before the user's own words on the command line, so that the user's win.
FLAGS = (
    "--distributed-backend=gloo",
    "--use-cpu-initialization",
    "--transformer-impl=local",
    "--no-masked-softmax-fusion",
    "--no-bias-gelu-fusion",
    "--no-bias-swiglu-fusion",
    "--no-bias-dropout-fusion",
    "--no-gradient-accumulation-fusion",
    "--no-persist-layer-norm",
    "--no-rope-fusion",
    "--cp-comm-type=all_gather",
)
_OF_GPUS = {
    "--cuda-graph-impl, --enable-cuda-graph, --external-cuda-graph, --optimizer-cuda-graph": (
        "a graph captures what CUDA does"
    ),
    "--gpu-sniff-test-interval": "it tests GPUs",
    "--log-device-memory-used, --log-energy": "it asks a GPU's driver",
    "--moe-router-fusion": "the kernel is Transformer Engine's",
    "--nccl-communicator-config-path, --use-nccl-ub, --use-sharp": "it is for NCCL",
    "--record-memory-history": "it records CUDA's allocator",
    "--use-persistent-ckpt-worker": "its process counts GPUs",
}


def check(args: Namespace) -> None:
    """Refuse what runs on a GPU only.

    Raises:
        ValueError: one line for each such option, with its fix.
    """
    found = {
        "--transformer-impl transformer_engine: its kernels are for GPUs; drop it": (
            args.transformer_impl == "transformer_engine"
        ),
        f"--cp-comm-type {' '.join(args.cp_comm_type)}: attention that passes keys on is "
        "Transformer Engine's, here they are gathered; drop it": (
            args.context_parallel_size > 1 and set(args.cp_comm_type) != {"all_gather"}
        ),
        "--moe-token-dispatcher-type alltoall with experts that tensor-parallel ranks share: gloo "
        "gathers equal numbers of tokens alone; add --expert-tensor-parallel-size 1": (
            args.num_experts
            and args.moe_token_dispatcher_type == "alltoall"
            and args.expert_model_parallel_size > 1
            and (args.expert_tensor_parallel_size or args.tensor_model_parallel_size) > 1
        ),
        "--profile: records what CUDA does; add --use-pytorch-profiler": (
            args.profile and not args.use_pytorch_profiler
        ),
        "--multi-latent-attention with --qk-layernorm and without --q-lora-rank: the query's norm "
        "stands behind its low-rank projection; give --q-lora-rank, or drop --qk-layernorm": (
            args.multi_latent_attention and args.qk_layernorm and args.q_lora_rank is None
        ),
        f"--distributed-backend {args.distributed_backend}: it connects GPUs; drop it": (
            args.distributed_backend != "gloo"
        ),
        f"--num-experts {args.num_experts} without --disable-bias-linear: the experts of "
        "--transformer-impl local add their bias in place, and autograd refuses that; "
        "add --disable-bias-linear": (
            args.num_experts and args.add_bias_linear and args.tensor_model_parallel_size == 1
        ),
    }
    problems = [problem for problem, there in found.items() if there]
    for flags, why in _OF_GPUS.items():
        given = filter(None, (asked(args, flag) for flag in flags.split(", ")))
        problems += [f"{flag}: {why}; drop it" for flag in given]
    if problems:
        raise ValueError("\n".join(f"with --device cpu, {problem}" for problem in problems))
