"""Requirements of a run on GPUs besides flags: kernels, libraries, settings of CUDA and NCCL.

Nothing here imports torch or touches a GPU. So a run that would hang or fail in its first iteration
is refused before it begins.
"""

import os
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

_RUNTIME = Path(__file__).parents[1] / "runtime"
OFFLOAD_LIBRARY = _RUNTIME / "offload" / "offload.cuda.so"
DELTA_LIBRARIES = {  # the dots in the names keep Python from importing them as modules
    "cpu": _RUNTIME / "grad_sync" / "delta_code.cpu.so",
    "cuda": _RUNTIME / "grad_sync" / "delta_code.cuda.so",
}
FUSION_KERNEL = "fused_weight_gradient_mlp_cuda"  # of NVIDIA's apex
BLACKWELL = 10  # major compute capability; below it Megatron asserts one hardware queue
MOST_CONNECTIONS = 32  # hardware queues; CUDA reads larger numbers as 32
TOO_FEW_CONNECTIONS = (
    "with --preemptive-comm: a rank has more streams than that, and of two that share a hardware "
    "queue one may hold back a send that another rank needs; give "
    f"{MOST_CONNECTIONS}, with tensor parallelism too; with 1, slices=on starts slices where "
    "the plan has them"
)

_ON = ("1", "y", "yes", "t", "true", "detail")  # values that torch reads as true
_WAITS = "the host would wait for every transfer and reduction, and nothing would overlap"
_NO_CACHE = "PYTORCH_NO_CUDA_MEMORY_CACHING"  # on with any value
_BLOCKING = {
    "CUDA_LAUNCH_BLOCKING": "a receive that is posted early would hold the host, which then never "
    "sends what the other rank waits for",
    "TORCH_NCCL_BLOCKING_WAIT": _WAITS,
    "NCCL_BLOCKING_WAIT": _WAITS,
    "TORCH_DISTRIBUTED_DEBUG": "every collective would first meet all its ranks on the host",
    _NO_CACHE: "cudaFree would wait for the device, and so for a receive whose send may need what "
    "the host has not launched",
}
"""The effect of each setting on any plan, if the setting is on."""
_TIMING = dict.fromkeys(
    (
        *("TORCH_NCCL_ENABLE_TIMING", "NCCL_ENABLE_TIMING"),
        *("TORCH_NCCL_DESYNC_DEBUG", "NCCL_DESYNC_DEBUG"),
    ),
    "with CUDA_DEVICE_MAX_CONNECTIONS=1: NCCL's collectives would have events with timing, and "
    "computation would not start before these have passed",
)
"""The effect of settings where all streams share one hardware queue."""
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_CLASS_OF_ALL = ("NCCL_IB_SL", "NCCL_IB_TC")
_CLASSES = range(256)


def has_fusion_kernel() -> bool:
    """Return whether Megatron's own layers can accumulate gradients in the kernel of the backward.

    This fusion is Megatron's default, and its own layers fail without a kernel of NVIDIA's apex.
    Transformer Engine's layers have other kernels.
    """
    return find_spec(FUSION_KERNEL) is not None


def default_flags() -> tuple[str, ...]:
    """Return flags for a run without any fused kernels; the user's own flags override them.

    With Transformer Engine only Megatron's own layers, such as the output layer, run unfused.
    """
    fuses = has_fusion_kernel() or find_spec("transformer_engine") is not None
    return () if fuses else ("--no-gradient-accumulation-fusion",)


def has_many_queues() -> bool:
    """Tell whether the user gives CUDA `MOST_CONNECTIONS` hardware queues.

    Megatron asserts one queue for tensor and context parallelism before Blackwell. Only this number
    lifts the assertion.
    """
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == str(MOST_CONNECTIONS)


def blocking_settings(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each setting that blocks or hangs our plans on GPUs, with the reason."""
    has_one_queue = environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    for name, rule in {**_BLOCKING, **(_TIMING if has_one_queue else {})}.items():
        value = environment.get(name, "")
        if value.lower() in _ON or (value and name == _NO_CACHE):
            yield f"{name}={value}", rule


def gpu_problems(args: Namespace, schedule: str) -> Iterator[str]:
    """Yield one message (found, rule, fix) per setting with which a run on GPUs would fail."""
    if args.device != "cuda" or schedule == "stock":
        return
    for found, rule in blocking_settings(os.environ):
        yield f"{found}: {rule}; unset it, or use --schedule stock"
    if args.preemptive_comm and "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ:
        yield f"CUDA_DEVICE_MAX_CONNECTIONS, unset and so 8, {TOO_FEW_CONNECTIONS}"
    if args.timing_log_level > 1 and args.pipeline_model_parallel_size > 1:
        yield (
            f"--timing-log-level {args.timing_log_level}: in each forward and backward the host "
            "would wait for the whole device, also for a receive that is posted early; two ranks "
            "would wait for each other; give --timing-log-level 1, or use --schedule stock"
        )
    num_ranks = os.environ.get("WORLD_SIZE", "1")
    spans_nodes = int(num_ranks) > int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    if args.lazy_inter_segment and spans_nodes and _GLOO_INTERFACE not in os.environ:
        yield (
            f"--lazy-inter-segment on several nodes without {_GLOO_INTERFACE}: its tensors go from "
            "host to host over gloo, which takes the network of the host's name, often the one for "
            f"management; give the fast one, such as {_GLOO_INTERFACE}=ib0, or drop the flag"
        )
    flags = {
        f"--offload-activations {args.offload_activations}": args.offload_activations != "off",
        "--lazy-inter-segment": args.lazy_inter_segment,
    }
    asking = " and ".join(flag for flag, given in flags.items() if given)
    if asking and not OFFLOAD_LIBRARY.exists():
        yield (
            f"{asking} without {OFFLOAD_LIBRARY}: on a GPU this library "
            "copies and holds host memory; run: make build-cuda"
        )


def delta_library_problems(args: Namespace) -> Iterator[str]:
    """Yield one message (found, rule, fix) per flag of a code that lacks its library."""
    library = DELTA_LIBRARIES[args.device]
    build = "make extension" if args.device == "cpu" else "make build-cuda"
    flags = {
        "--delta-param-gather on": args.delta_param_gather,
        "--coded-grad-reduce on": args.coded_grad_reduce,
    }
    for flag, value in flags.items():
        if value == "on" and not library.exists():
            yield f"{flag} without {library}, which has the code; run: {build}"


def traffic_classes(text: str) -> dict[str, int]:
    """Read ``--traffic-class``: a class for ``pp``, for ``dp``, or for both."""
    pairs = [pair.partition("=") for pair in text.split(",")]
    classes = {name: number for name, _, number in pairs}
    if len(classes) < len(pairs) or not (
        classes.keys() <= {"pp", "dp"} and all(map(str.isdecimal, classes.values()))
    ):
        raise ArgumentTypeError(f"{text!r}: a class is a number for pp, dp or both; give pp=N,dp=N")
    return {name: int(number) for name, number in classes.items()}


def launch_problems(args: Namespace) -> Iterator[str]:
    """Yield one message (found, rule, fix) per setting that may hang ``--preemptive-comm``.

    One thread starts ready collectives while another runs ahead on the compute stream, and ranks'
    gates differ in timing. So a setting that makes the device keep the order of launches can
    deadlock ranks.
    """
    if args.device != "cuda" or not args.preemptive_comm:
        return
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if connections is not None and not has_many_queues():
        yield f"CUDA_DEVICE_MAX_CONNECTIONS={connections} {TOO_FEW_CONNECTIONS}"
    if os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") == "1":
        yield (
            "NCCL_LAUNCH_ORDER_IMPLICIT=1 with --preemptive-comm: groups would have to start their "
            "operations in one order on all ranks, and a gate delays those of one rank; unset it"
        )


def traffic_class_problems(args: Namespace) -> Iterator[str]:
    """Yield one message (found, rule, fix) per reason why ``--traffic-class`` cannot work."""
    classes: dict[str, int] = args.traffic_class
    if not classes:
        return
    found = f"--traffic-class {','.join(f'{name}={value}' for name, value in classes.items())}"
    if unknown := [value for value in classes.values() if value not in _CLASSES]:
        yield (
            f"{found}: {unknown[0]} is no class, which is a number from {_CLASSES[0]} to "
            f"{_CLASSES[-1]}; on InfiniBand the service level, 0 to 15, on RoCE four times the DSCP"
        )
    if args.device == "cpu":
        yield (
            f"{found} with --device cpu: gloo does not mark its packets; drop the flag, or train "
            "on GPUs"
        )
    for name in _CLASS_OF_ALL if args.device == "cuda" else ():
        if (value := os.environ.get(name)) is not None:
            yield (
                f"{name}={value} with {found}: it sets the class of all of NCCL's connections and "
                "wins; drop one of the two"
            )
