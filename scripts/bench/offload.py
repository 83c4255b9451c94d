r"""What offloading costs: one pipeline rank with stand-ins for its neighbours, and bare copies.

    .venv/bin/python -m scripts.bench.offload rank --device cpu
    .venv/bin/python -m scripts.bench.offload rank --device cuda --hidden-size 6144 --heads 48 \
        --tensor-parallel 8 --layers 5 --micro-batch-size 4 --seq-length 2048
    .venv/bin/python -m scripts.bench.offload copies

The second is GPT-3 18B's shape: 4 ranks, 2 segments of 5 layers. `rank` runs the program of one
rank of an AIAO pipeline over layers recomputed in backward: what arrives is random, what leaves
is dropped. The layers are one tensor-parallel rank's share of a transformer's, without its
collectives. Four ways to keep what is saved take turns, iteration by iteration: on the device,
`Offloader`, torch's ``save_on_cpu``, and on the device under 1F1B, which AIAO is to be as small as.
`copies` needs a GPU: batched, kernel and single copies of many sizes, against one large copy.
Training makes batched ones, so `copies` fails where another way is more than 5% faster.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import custom_backward, deallocate_output_tensor
from torch import nn
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from megatron.fold3d.config.fold3d_config import Fold3DConfig
from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.compile import Job
from megatron.fold3d.plan.ir import Action, Plan, Program
from megatron.fold3d.plan.memory import peak_activations
from megatron.fold3d.plan.ops import TABLE, Place
from megatron.fold3d.plan.passes.offload import OffloadChoice
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.policy.offload_choice import offloaded
from megatron.fold3d.runtime.device import Mark, mark_now, peak_device_bytes, synchronize
from megatron.fold3d.runtime.events import Events
from megatron.fold3d.runtime.offload.host_memory import take
from megatron.fold3d.runtime.offload.offload_library import batched_copy
from megatron.fold3d.runtime.offload.offloader import Offloader
from scripts.bench.options import parser_of
from scripts.paper.perf_model import aiao_activation_bytes

MIB = 1 << 20
Hooks = AbstractContextManager[object]
_ROUNDS = 5
_ROUND_BYTES = 4 << 30
WAYS = ("device", "offload", "save_on_cpu", "1f1b")
TRAINING = "batched"  # how training copies


class Layer(nn.Module):
    """One tensor-parallel rank's share of a transformer layer, without the collectives.

    With sequence parallelism it takes and gives a part of the sequence; copies of that part stand
    for the others'.
    """

    def __init__(self, hidden_size: int, heads: int, shards: int, parts: int) -> None:
        super().__init__()
        self.parts = parts  # of the sequence
        self.heads, self.head_size = heads // shards, hidden_size // heads
        share = hidden_size // shards
        self.first_norm, self.second_norm = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.qkv, self.project = nn.Linear(hidden_size, 3 * share), nn.Linear(share, hidden_size)
        self.up, self.down = nn.Linear(hidden_size, 4 * share), nn.Linear(4 * share, hidden_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``[seq / parts, batch, hidden]`` to the same."""
        own, batch, _ = hidden.shape
        seq = own * self.parts
        gathered = self._gathered(self.first_norm(hidden))
        qkv = self.qkv(gathered).view(seq, batch, self.heads, 3 * self.head_size)
        q, k, v = (part.permute(1, 2, 0, 3) for part in qkv.chunk(3, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.project(mixed.permute(2, 0, 1, 3).reshape(seq, batch, -1))[:own]
        gathered = self._gathered(self.second_norm(hidden))
        result: torch.Tensor = self.down(nn.functional.gelu(self.up(gathered)))
        return hidden + result[:own]

    def _gathered(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if self.parts == 1 else hidden.repeat(self.parts, 1, 1)


class Reloads(Events):
    """When activations were back on a device, and when their backwards needed them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._back: dict[tuple[int, int | None], Mark] = {}
        self._both: list[tuple[Mark, Mark]] = []

    def open_span(self, name: object, kind: str) -> Callable[[], None]:
        """Note the end of a copy, there or back."""
        assert isinstance(name, Action)
        key = name.stage, name.microbatch
        return lambda: self._back.update({key: mark_now(self._device)})

    def note_need(self, backward: Action) -> None:
        """Note that a backward begins."""
        if (back := self._back.pop((backward.stage, backward.microbatch), None)) is not None:
            self._both.append((back, mark_now(self._device)))

    def num_early(self) -> int:
        """Return how many were back in time; the device must have done all work."""
        return sum(needed.after_s(back) >= 0 for back, needed in self._both)


@dataclass(slots=True)
class Way:
    """One way to keep activations: how, and what its iterations took.

    Attributes:
        hooks: what autograd saves them through, if anything of torch's.
        device_bytes: the most that tensors held of the device's memory in one of them.
        programs: what ran, with its `peak`, by what was chosen to leave.
        peak: the most activations on the device, by the verifier.
    """

    order: Plan
    offloader: Offloader | None = None
    reloads: Reloads | None = None
    hooks: Callable[[], Hooks] = nullcontext
    times_ms: list[float] = field(default_factory=list)
    device_bytes: int | None = None
    programs: dict[OffloadChoice | None, tuple[Program, int]] = field(default_factory=dict)
    peak: int = 0

    def program(self, rank: int) -> Program:
        """Return what runs next, with the copies that the offloader chooses; sets `peak`."""
        own, offloader = self.order.programs[rank], self.offloader
        choice = None if offloader is None else offloader.choice(own)
        if choice not in self.programs:
            program = own if choice is None else offloaded(own, choice)
            depth = 1 if choice is None else choice.depth
            self.programs[choice] = program, peak_activations(Plan((program,)), depth=depth)[0]
        program, self.peak = self.programs[choice]
        return program

    @classmethod
    def named(
        cls, name: str, device: torch.device, saved_bytes: int, args: argparse.Namespace
    ) -> "Way":
        """Return one of `WAYS`, for stages that save so much for each micro-batch."""
        is_1f1b = name == "1f1b"
        order = build(
            "1f1b" if is_1f1b else args.schedule,
            num_ranks=args.ranks,
            num_segments=1 if is_1f1b else args.segments,
            # 1F1B has one segment: as many computations of as many layers.
            num_microbatches=args.micro_batches * (args.segments if is_1f1b else 1),
        )
        if name == "offload":
            config = Fold3DConfig(
                job=Job(choice=Choice.plain(args.schedule, args.segments), num_ranks=args.ranks),
                device=args.device,
                distributed_timeout_minutes=1,
                offload_activations="on",
                offload_everything=True,
                saved_bytes=saved_bytes,
            )
            reloads = Reloads(device)
            return cls(order, offloader=Offloader(config, recorder=reloads), reloads=reloads)
        if name == "save_on_cpu":
            pin = device.type == "cuda"
            return cls(order, hooks=lambda: torch.autograd.graph.save_on_cpu(pin_memory=pin))
        return cls(order)


class Rank:
    """One pipeline rank: a chunk of layers per segment, and a program."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device = torch.device(args.device)
        dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
        parts = args.tensor_parallel if args.sequence_parallel else 1
        self.shape = (args.seq_length // parts, args.micro_batch_size, args.hidden_size)
        self.hidden_bytes = torch.Size(self.shape).numel() * dtype.itemsize
        self.rank, self.num_ranks = args.rank, args.ranks
        self.chunks = [
            nn.Sequential(
                *(
                    Layer(args.hidden_size, args.heads, args.tensor_parallel, parts)
                    for _ in range(args.layers)
                )
            ).to(self.device, dtype)
            for _ in range(args.segments)
        ]
        self.arriving = torch.randn(self.shape, device=self.device, dtype=dtype)

    def iterate(self, way: Way) -> None:
        """Run one iteration."""
        offloader, hooks = way.offloader, way.hooks
        program = way.program(self.rank)
        saved: dict[tuple[int, int | None], tuple[torch.Tensor, torch.Tensor]] = {}
        if offloader is not None:
            sizes = {"chunks": self.chunks, "hidden_bytes": self.hidden_bytes}
            iteration: Any = SimpleNamespace(trains=True, program=program, **sizes)
            offloader.prepare(iteration)
        for action in program:
            key, row = (action.stage, action.microbatch), TABLE[action.op]
            if row.kind == "forward":
                tensor = self.arriving.clone().requires_grad_()
                with hooks() if offloader is None else offloader.saving(action):
                    saved[key] = tensor, self._forward(action, tensor)
                deallocate_output_tensor(saved[key][1], deallocate_pipeline_outputs=True)  # sent
            elif row.kind == "backward":
                _, output = saved.pop(key)
                if way.reloads is not None:
                    way.reloads.note_need(action)
                with nullcontext() if offloader is None else offloader.using(action):
                    custom_backward(output, self.arriving)
            elif offloader is not None and row.place is Place.TO_HOST:
                offloader.offload(action, saved[key][0])
            elif offloader is not None and row.place is Place.TO_DEVICE:
                offloader.reload(action)

    def _forward(self, action: Action, tensor: torch.Tensor) -> torch.Tensor:
        output = tensor
        for layer in self.chunks[action.stage // self.num_ranks % len(self.chunks)]:
            output = checkpoint(layer, output, use_reentrant=True, preserve_rng_state=False)
        return output


def run_rank(args: argparse.Namespace) -> int:
    """Compare the ways to keep activations; returns the exit code."""
    rank = Rank(args)
    saved_bytes = args.layers * rank.hidden_bytes
    ways = {name: Way.named(name, rank.device, saved_bytes, args) for name in args.only}
    for number in tqdm(range(args.warm_up + args.iterations), disable=None):
        for way in ways.values():
            _iterate(rank, way, counts=number >= args.warm_up)
    print("| way | iteration ms (min-max) | device MiB | activations on the device, at most |")
    print("|---|--:|--:|--:|")
    for name, way in ways.items():
        low, middle, high = min(way.times_ms), median(way.times_ms), max(way.times_ms)
        memory = "-" if way.device_bytes is None else f"{way.device_bytes / MIB:.0f}"
        print(f"| {name} | {middle:.1f} ({low:.1f}-{high:.1f}) | {memory} | {way.peak} |")
    if "offload" in ways:
        _report(rank, ways["offload"], args)
        _compare(ways)
    return 0


def _iterate(rank: Rank, way: Way, *, counts: bool) -> None:
    if rank.device.type == "cuda":
        torch.get_device_module(rank.device).reset_peak_memory_stats()
    synchronize(rank.device)
    start = time.perf_counter()
    rank.iterate(way)
    synchronize(rank.device)
    if counts:
        way.times_ms.append((time.perf_counter() - start) * 1e3)
        way.device_bytes = max(
            filter(None, (way.device_bytes, peak_device_bytes(rank.device))), default=None
        )
    assert way.offloader is None or way.offloader.peak == way.peak


def _report(rank: Rank, way: Way, args: argparse.Namespace) -> None:
    """Say what the offloader did, and what equation 7 says of the host's memory."""
    offloader, reloads = way.offloader, way.reloads
    assert offloader is not None  # of this way
    assert reloads is not None
    pool, copies = offloader.pool, offloader.copies
    iterations = args.warm_up + args.iterations
    print(
        f"pool {pool.num_bytes / MIB:.2f} MiB in {pool.num_growths} pieces, "
        f"{pool.num_bytes / pool.high_water_bytes:.3f} of its high water; "
        f"{copies.num_tensors / iterations:.0f} tensors in {copies.num_calls / iterations:.0f} "
        f"copy calls an iteration; {reloads.num_early()} of {offloader.num_reloads} activations "
        f"were back before they were needed; depth {offloader.depth}"
    )
    saved_bytes = args.layers * rank.hidden_bytes
    equation_7 = aiao_activation_bytes(args.segments, args.micro_batches, saved_bytes)
    held = peak_activations(way.order)[args.rank] * saved_bytes
    print(
        f"host memory: {pool.num_bytes / held:.3f} of what the schedule holds (goal: within 5%), "
        f"{pool.num_bytes / equation_7:.3f} of equation 7, which is --schedule afab's"
    )


def _compare(ways: dict[str, Way]) -> None:
    """Print what offloading is judged by, as far as the ways for it were run."""
    ours = ways["offload"]
    if "device" in ways:
        pairs = zip(ours.times_ms, ways["device"].times_ms, strict=True)  # taken in turn
        overhead = median(mine / theirs for mine, theirs in pairs) - 1
        print(f"overhead: {overhead:+.1%} of an iteration on the device alone (goal: below 2%)")
    if "1f1b" in ways and ours.device_bytes and ways["1f1b"].device_bytes:
        ratio = ours.device_bytes / ways["1f1b"].device_bytes
        print(f"device memory: {ratio:.3f} of 1F1B's (goal: at most 1.05)")


def run_copies(args: argparse.Namespace) -> int:
    """Compare copies to and from a GPU, in GB/s; returns the exit code."""
    device = torch.device("cuda", torch.cuda.current_device())
    stream = torch.get_device_module(device).Stream()
    host, there = take(args.most, device), torch.empty(args.most, dtype=torch.uint8, device=device)

    def single(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)

    ways: dict[str, Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]] = {
        "single": single,
        "batched": lambda to, of: batched_copy(to, of, stream.cuda_stream),
        "kernel": lambda to, of: batched_copy(to, of, stream.cuda_stream, args.blocks),
    }
    of_sizes: list[dict[str, float]] = []
    print("| direction | tensors | MiB each |", " | ".join(ways), "| of the ceiling |")
    print("|---|--:|--:|" + "--:|" * (len(ways) + 1))
    for name, target, source in (("to host", host, there), ("to device", there, host)):
        ceiling = _rate(stream, partial(single, [target], [source]), args.most)
        for count, mib in itertools.product((1, 4, 16, 64), (0.25, 1, 4, 16, 64)):
            size = int(mib * MIB)
            if count * size > args.most:
                continue
            to, of = (side[: count * size].split(size) for side in (target, source))
            rates = {way: _rate(stream, partial(ways[way], to, of), count * size) for way in ways}
            of_sizes.append(rates)
            shown = " | ".join(f"{rate:.1f}" for rate in rates.values())
            print(f"| {name} | {count} | {mib} | {shown} | {rates[TRAINING] / ceiling:.2f} |")
        print(f"| {name} | 1 | {args.most / MIB:.0f} | {ceiling:.1f} | | | 1 |")
    faster = faster_than_training(of_sizes)
    print(f"training's way, {TRAINING}, is slower than another in {faster} of {len(of_sizes)} rows")
    return int(faster > 0)


def faster_than_training(of_sizes: Sequence[Mapping[str, float]]) -> int:
    """Return in how many of these rates, by way, another is more than 5% above training's."""
    return sum(max(rates.values()) > 1.05 * rates[TRAINING] for rates in of_sizes)


def _rate(stream: torch.Stream, copy: Callable[[], None], num_bytes: int) -> float:
    """GB/s of a copy on one stream: the median of rounds, each back to back for a while."""
    backend = torch.get_device_module("cuda")
    times = max(1, min(50, _ROUND_BYTES // num_bytes))
    rates: list[float] = []
    for _ in range(1 + _ROUNDS):
        start, end = (backend.Event(enable_timing=True) for _ in range(2))
        with backend.stream(stream):
            start.record()
            for _ in range(times):
                copy()
            end.record()
        end.synchronize()
        rates.append(num_bytes * times / start.elapsed_time(end) / 1e6)
    return median(rates[1:])  # the first one warms up


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the two benches; returns the exit code."""
    parser = parser_of(__doc__)
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
    rank.add_argument("--sequence-parallel", action="store_true")
    rank.add_argument("--schedule", choices=("aiao", "afab"), default="aiao")
    rank.add_argument("--only", nargs="+", choices=WAYS, default=WAYS)
    copies = commands.add_parser("copies", help="bare copies to and from a GPU")
    copies.set_defaults(run=run_copies)
    copies.add_argument("--most", type=int, default=4096 * MIB, help="bytes of the largest copy")
    copies.add_argument("--blocks", type=int, default=32, help="of the copying kernel")
    args = parser.parse_args(argv)
    if getattr(args, "device", "cuda") == "cuda" and not torch.cuda.is_available():
        fix = "rank takes --device cpu" if "device" in args else "run it where there is one"
        parser.error(f"torch finds no CUDA device, copies to a GPU need one; {fix}")
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
