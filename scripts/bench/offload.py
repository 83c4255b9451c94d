r"""What offloading costs: one pipeline rank with stand-ins for its neighbours, and bare copies.

    .venv/bin/python -m scripts.bench.offload rank --device cpu
    .venv/bin/python -m scripts.bench.offload rank --device cuda --hidden-size 6144 --heads 48 \
        --tensor-parallel 8 --layers 5 --micro-batch-size 4 --seq-length 2048
    .venv/bin/python -m scripts.bench.offload copies

`rank` runs the program of one rank of an AIAO pipeline over layers that are recomputed in backward:
what arrives is random, what leaves is dropped. The layers are one tensor-parallel rank's share of a
transformer's, without its collectives. Four ways to keep what is saved take turns: on the device,
`Offloader`, torch's ``save_on_cpu``, and on the device under 1F1B, which AIAO is to be as small as.
`copies` needs a GPU: batched, kernel and single copies of many sizes, against one large copy.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from megatron.fold3d.plan.ir import Action, Op, Plan
from megatron.fold3d.plan.lowering import add_offload
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.plan.verify import peak_activations
from megatron.fold3d.runtime.device import peak_device_bytes
from megatron.fold3d.runtime.host_memory import take
from megatron.fold3d.runtime.offload_library import batched_copy, kernel_copy
from megatron.fold3d.runtime.offloader import Offloader

MIB = 1 << 20
Hooks = AbstractContextManager[object]
WAYS = ("device", "offload", "save_on_cpu", "1f1b")


class Layer(nn.Module):
    """One tensor-parallel rank's share of a transformer layer, without the collectives."""

    def __init__(self, hidden_size: int, heads: int, shards: int) -> None:
        super().__init__()
        self.heads, self.head_size = heads // shards, hidden_size // heads
        share = hidden_size // shards
        self.first_norm, self.second_norm = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.qkv, self.project = nn.Linear(hidden_size, 3 * share), nn.Linear(share, hidden_size)
        self.up, self.down = nn.Linear(hidden_size, 4 * share), nn.Linear(4 * share, hidden_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``[seq, batch, hidden]`` to the same."""
        seq, batch, _ = hidden.shape
        qkv = self.qkv(self.first_norm(hidden)).view(seq, batch, self.heads, 3 * self.head_size)
        q, k, v = (part.permute(1, 2, 0, 3) for part in qkv.chunk(3, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.project(mixed.permute(2, 0, 1, 3).reshape(seq, batch, -1))
        result: torch.Tensor = self.down(nn.functional.gelu(self.up(self.second_norm(hidden))))
        return hidden + result


@dataclass(frozen=True, slots=True)
class Result:
    """One way: times of its iterations, the most of the device's memory, what the offloader did."""

    times_ms: list[float]
    device_bytes: int | None
    offloader: Offloader | None
    peak_activations: int


class Rank:
    """One pipeline rank: a chunk of layers per segment, and a program."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device = torch.device(args.device)
        dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
        self.shape = (args.seq_length, args.micro_batch_size, args.hidden_size)
        self.hidden_bytes = torch.Size(self.shape).numel() * dtype.itemsize
        self.rank, self.num_ranks = args.rank, args.ranks
        self.chunks = [
            nn.Sequential(
                *(Layer(args.hidden_size, args.heads, args.tensor_parallel) for _ in range(layers))
            ).to(self.device, dtype)
            for layers in [args.layers] * args.segments
        ]
        self.arriving = torch.randn(self.shape, device=self.device, dtype=dtype)

    def iterate(self, plan: Plan, offloader: Offloader | None, hooks: Callable[[], Hooks]) -> None:
        """Run one iteration."""
        program = plan.programs[self.rank]
        saved: dict[tuple[int, int | None], tuple[torch.Tensor, torch.Tensor]] = {}
        if offloader is not None:
            offloader.begin(program, self.chunks, self.hidden_bytes)
        for action in program:
            key = action.stage, action.microbatch
            if action.op is Op.FORWARD:
                tensor = self.arriving.clone().requires_grad_()
                with hooks() if offloader is None else offloader.saving(action):
                    saved[key] = tensor, self._forward(action, tensor)
            elif action.op is Op.BACKWARD:
                _, output = saved.pop(key)
                with nullcontext() if offloader is None else offloader.using(action):
                    output.backward(self.arriving)
            elif offloader is not None and action.op is Op.OFFLOAD:
                offloader.offload(action, saved[key][0])
            elif offloader is not None and action.op is Op.RELOAD:
                offloader.reload(action)

    def _forward(self, action: Action, tensor: torch.Tensor) -> torch.Tensor:
        output = tensor
        for layer in self.chunks[action.stage // self.num_ranks % len(self.chunks)]:
            output = checkpoint(layer, output, use_reentrant=True)
        return output


def run_rank(args: argparse.Namespace) -> int:
    """Compare the ways to keep activations; returns the exit code."""
    rank = Rank(args)
    results = {way: _run(rank, way, args) for way in tqdm(args.only, disable=None)}
    header = "| way | iteration ms (min-max) | device MiB | activations on the device, at most |"
    print(header, "|---|--:|--:|--:|", sep="\n")
    for way, result in results.items():
        low, high = min(result.times_ms), max(result.times_ms)
        memory = "-" if result.device_bytes is None else f"{result.device_bytes / MIB:.0f}"
        times = f"{median(result.times_ms):.1f} ({low:.1f}-{high:.1f})"
        print(f"| {way} | {times} | {memory} | {result.peak_activations} |")
    if "offload" in results:
        _report(results["offload"], args)
    return 0


def _run(rank: Rank, way: str, args: argparse.Namespace) -> Result:
    order = build(
        "1f1b" if way == "1f1b" else "aiao",
        num_ranks=args.ranks,
        num_segments=1 if way == "1f1b" else args.segments,
        # 1F1B has one segment: as many computations of as many layers.
        num_microbatches=args.micro_batches * (args.segments if way == "1f1b" else 1),
    )
    plan = add_offload(order) if way == "offload" else order
    offloader = Offloader(rank.device, everything=True) if way == "offload" else None
    on_gpu = rank.device.type == "cuda"
    hooks: Callable[[], Hooks] = nullcontext
    if way == "save_on_cpu":
        hooks = lambda: torch.autograd.graph.save_on_cpu(pin_memory=on_gpu)  # noqa: E731
    backend = torch.get_device_module(rank.device)
    if on_gpu:
        backend.reset_peak_memory_stats()
    times_ms = []
    for number in range(args.warm_up + args.iterations):
        backend.synchronize()
        start = time.perf_counter()
        rank.iterate(plan, offloader, hooks)
        backend.synchronize()
        if number >= args.warm_up:
            times_ms.append((time.perf_counter() - start) * 1e3)
    peak = peak_activations(plan)[args.rank]
    assert offloader is None or offloader.peak == peak
    return Result(times_ms, peak_device_bytes(rank.device), offloader, peak)


def _report(result: Result, args: argparse.Namespace) -> None:
    offloader = result.offloader
    assert offloader is not None  # of this way
    pool, copies = offloader.pool, offloader.copies
    iterations = args.warm_up + args.iterations
    print(
        f"pool {pool.num_bytes / MIB:.2f} MiB in {pool.num_growths} pieces, "
        f"{pool.num_bytes / pool.high_water_bytes:.3f} of its high water; "
        f"{copies.num_tensors / iterations:.0f} tensors in {copies.num_calls / iterations:.0f} "
        f"copy calls an iteration; {offloader.num_early} of {offloader.num_reloads} activations "
        "were back before they were needed"
    )


def run_copies(args: argparse.Namespace) -> int:
    """Compare copies to and from a GPU, in GB/s; returns the exit code."""
    device = torch.device("cuda")
    stream = torch.get_device_module(device).Stream()
    host, there = take(args.most, device), torch.empty(args.most, dtype=torch.uint8, device=device)

    def single(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)

    ways: dict[str, Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]] = {
        "single": single,
        "batched": lambda to, of: batched_copy(to, of, stream.cuda_stream),
        "kernel": lambda to, of: kernel_copy(to, of, stream.cuda_stream, args.blocks),
    }
    print("| direction | tensors | MiB each |", " | ".join(ways), "| of the ceiling |")
    print("|---|--:|--:|" + "--:|" * (len(ways) + 1))
    for name, target, source in (("to host", host, there), ("to device", there, host)):
        ceiling = _rate(stream, partial(single, [target], [source]), args.most)
        for count, mib in itertools.product((1, 4, 16, 64), (0.25, 1, 4, 16, 64)):
            size = int(mib * MIB)
            if count * size > args.most:
                continue
            to, of = (side[: count * size].split(size) for side in (target, source))
            rates = [_rate(stream, partial(way, to, of), count * size) for way in ways.values()]
            shown = " | ".join(f"{rate:.1f}" for rate in rates)
            print(f"| {name} | {count} | {mib} | {shown} | {rates[1] / ceiling:.2f} |")
        print(f"| {name} | 1 | {args.most / MIB:.0f} | {ceiling:.1f} | | | 1 |")
    return 0


def _rate(stream: torch.Stream, copy: Callable[[], None], num_bytes: int, times: int = 20) -> float:
    """GB/s of a copy, back to back on one stream."""
    backend = torch.get_device_module("cuda")
    with backend.stream(stream):
        copy()
        start, end = (backend.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            copy()
        end.record()
    end.synchronize()
    return float(num_bytes * times / start.elapsed_time(end) / 1e6)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the two benches; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    rank = commands.add_parser("rank", help="one pipeline rank, with and without offloading")
    rank.set_defaults(run=run_rank)
    rank.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    for name, default in (
        *(("ranks", 4), ("rank", 0), ("segments", 2), ("micro-batches", 16), ("layers", 2)),
        *(("hidden-size", 256), ("heads", 8), ("tensor-parallel", 1), ("seq-length", 64)),
        *(("micro-batch-size", 1), ("iterations", 8), ("warm-up", 2)),
    ):
        rank.add_argument(f"--{name}", type=int, default=default)
    rank.add_argument("--only", nargs="+", choices=WAYS, default=WAYS)
    copies = commands.add_parser("copies", help="bare copies to and from a GPU")
    copies.set_defaults(run=run_copies)
    copies.add_argument("--most", type=int, default=1024 * MIB, help="bytes of the largest copy")
    copies.add_argument("--blocks", type=int, default=32, help="of the copying kernel")
    args = parser.parse_args(argv)
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
