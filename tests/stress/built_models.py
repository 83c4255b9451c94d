"""Draw jobs, and compare the parameters that the planner counts with those that Megatron builds.

    .venv/bin/python -m tests.stress.built_models --jobs 500 --seed 7

One process is each rank in turn: torch's fake process group stands for all the others. A stage's
first and last rank are built, with Megatron's own parser, checks and builder, and compared number
by number: parameters, their bytes and those of their gradients, of experts apart. A draw that
Megatron or this project refuses is thrown away.
"""

import argparse
import inspect
import logging
import os
import random
import shlex
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from functools import cache
from io import StringIO
from itertools import chain, count
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.fold3d.commands.job import setup_of
from megatron.fold3d.commands.megatron_flags import described, shape_of
from megatron.fold3d.config.job_sizes import stage_layers
from megatron.fold3d.predict.cost_model.sizes import held_parameters
from megatron.fold3d.training import launch

REST = (
    "--device cpu --mock-data --tokenizer-type NullTokenizer --lr 1e-2 --eval-iters 0 "
    "--eval-interval 1 --train-iters 1 --micro-batch-size 1 --check"
)


class Job(NamedTuple):
    """One run: its ranks and its flags."""

    num_gpus: int
    flags: str


class Sizes(NamedTuple):
    """What one GPU holds of one stage."""

    parameters: float
    of_experts: float
    parameter_bytes: float
    gradient_bytes: float
    gradient_bytes_of_experts: float


def compared(seed: str, how_many: int) -> Iterator[tuple[Job, tuple[str, ...]]]:
    """Yield so many jobs that can run, and where the two differ: one line each."""
    left = how_many
    with patch("inspect.getsource", cache(inspect.getsource)):  # as Megatron's parser, seconds
        for number in count():
            job = _drawn(random.Random(f"{seed}/{number}"))
            with suppress(*launch.MISTAKES, ZeroDivisionError):  # of stages between two
                yield job, _differences(job)
                left -= 1
            if not left:
                return


def _drawn(draw: random.Random) -> Job:
    """Draw a job; sizes divide each other more often than by chance."""
    tp, pp, cp = draw.choice((1, 1, 2, 2, 4)), draw.randint(1, 4), draw.choice((1, 1, 1, 2))
    dp, segments = draw.choice((1, 2, 4)), draw.choice((1, 1, 2, 3)) if pp > 1 else 1
    heads, width = draw.choice((4, 8)), draw.choice((2, 4, 6))
    of_ffn = f"--ffn-hidden-size {4 * draw.randint(3, 20)}"
    words = [
        f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}",
        f"--num-attention-heads {heads} --hidden-size {heads * width * draw.choice((1, 1, 2))}",
        f"--seq-length {8 * cp} --max-position-embeddings {8 * cp + draw.choice((0, 0, 5))}",
        f"--vocab-size {draw.randint(40, 900)} --global-batch-size {8 * dp}",
        *_any(draw, f"--context-parallel-size {cp}" if cp > 1 else ""),
        *_any(draw, "", "--sequence-parallel" if tp > 1 else ""),
        *_any(draw, "", f"--make-vocab-size-divisible-by {draw.choice((1, 6, 8, 50))}"),
        *_any(draw, "", f"--kv-channels {2 * draw.randint(1, 5)}"),
        *_any(draw, "", "--untie-embeddings-and-output-weights"),
        *_any(draw, "", of_ffn),
        *_any(draw, "", "--swiglu", "--quick-geglu --no-bias-gelu-fusion"),
        *_any(draw, "", "--normalization RMSNorm"),
        *_any(draw, "", "--position-embedding-type rope"),
        *_any(draw, "", "", "--add-qkv-bias"),
        *_any(draw, "", "", "--qk-layernorm"),
        *_any(draw, "", "", "", "--softmax-type learnable"),
        *_any(draw, "", "", "", "--attention-output-gate"),
        *_any(draw, "", *PRECISIONS),
        *_any(draw, "", *("--use-distributed-optimizer" for _ in range(dp > 1))),
    ]
    attention = draw.choice(("", "groups", "latent"))
    if attention == "groups":
        words.append(f"--group-query-attention --num-query-groups {draw.choice((1, 2, 4))}")
    elif attention == "latent":
        words += _latent(draw)
    layers, stages = _layers(draw, pp, segments)
    words += [f"--num-layers {layers}", *stages]
    if draw.random() < 0.5:
        words += _experts(draw, tp, dp * cp, layers)
    elif draw.random() < 0.5:
        words.append("--disable-bias-linear")
    return Job(tp * pp * cp * dp, " ".join(filter(None, words)))


PRECISIONS = (
    "--bf16",
    "--bf16 --grad-reduce-in-bf16",
    "--fp16",
    "--fp16 --accumulate-allreduce-grads-in-fp32",
)


def _any(draw: random.Random, *choices: str) -> tuple[str, ...]:
    return (draw.choice(choices),)


def _latent(draw: random.Random) -> Iterator[str]:
    yield f"--multi-latent-attention --kv-lora-rank {4 * draw.randint(1, 5)}"
    yield f"--qk-head-dim {2 * draw.randint(1, 4)} --qk-pos-emb-head-dim {4 * draw.randint(1, 2)}"
    yield f"--v-head-dim {2 * draw.randint(1, 4)}"
    yield from _any(draw, "", f"--q-lora-rank {4 * draw.randint(1, 5)}")


def _experts(draw: random.Random, tp: int, replicas: int, layers: int) -> Iterator[str]:
    experts = draw.choice((2, 4, 8))
    yield f"--num-experts {experts} --moe-router-topk {draw.randint(1, 2)} --moe-router-pre-softmax"
    yield f"--expert-model-parallel-size {draw.choice((1, 2, replicas, replicas * tp))}"
    yield from _any(draw, "", f"--expert-tensor-parallel-size {draw.choice((1, 1, 2, tp))}")
    yield from _any(draw, "", f"--moe-ffn-hidden-size {4 * draw.randint(2, 10)}")
    if draw.random() < 0.75:
        yield "--disable-bias-linear"
        yield from _any(draw, "", f"--moe-shared-expert-intermediate-size {draw.choice((8, 24))}")
        yield from _any(draw, "", "--moe-shared-expert-gate")
    dense = draw.randint(0, layers)
    pattern = f"[0]*{dense}+[1]*{layers - dense}"
    yield from _any(draw, "", f"--moe-layer-freq {pattern}", f"--moe-layer-freq ([1]*{layers})")


def _layers(draw: random.Random, pp: int, segments: int) -> tuple[int, list[str]]:
    """Return the layers, and the flags that put them on stages: evenly, unevenly, on a few."""
    stages = pp * segments
    chunks = f"--num-virtual-stages-per-pipeline-rank {segments}" if segments > 1 else ""
    kind = draw.choice(("even", "layout", "layout", "ends", "accounts"))
    if pp == 1 or kind == "even":
        return stages * draw.randint(1, 2), [chunks]
    if kind == "layout":
        counts = [draw.choice((0, 0, 1, 2, 3)) for _ in range(stages)]
        counts[draw.randrange(stages)] += 1
        cells = ["t" * count for count in counts]
        ends = 0, stages - 1
        if draw.random() < 0.25:  # wherever it is written, the last rank computes the loss
            ends = 0, max(stage for stage, count in enumerate(counts) if count)
        for end, letter in zip(ends, ("E{}", "{}L"), strict=True):
            cells[end] = letter.format(cells[end])
        return sum(counts), [f"--pipeline-model-parallel-layout {'|'.join(cells)}"]
    if kind == "accounts":
        ends = draw.choice(((1, 0), (0, 1), (1, 1)))
        flags = (f"--account-for-{end}-in-pipeline-split" for end in ("embedding", "loss"))
        given = [flag for flag, there in zip(flags, ends, strict=True) if there]
        return stages * draw.randint(1, 2) - sum(ends), [*given, chunks]
    first, last = (draw.choice((None, *range(1, 4))) for _ in range(2))
    each, total, flags = draw.randint(1, 2), 0, []
    for name, size in (("first", first), ("last", last)):
        total += segments * (each if size is None else size)
        if size is not None:
            flags.append(f"--decoder-{name}-pipeline-num-layers {segments * size}")
    return total + (pp - 2) * each * segments, [*flags, chunks]


def _differences(job: Job) -> tuple[str, ...]:
    """Return where the planner and Megatron differ.

    Raises:
        MISTAKES: the job cannot run.
    """
    os.environ.update(WORLD_SIZE=str(job.num_gpus), RANK="0", LOCAL_RANK="0")
    with ExitStack() as patched:
        patched.callback(_forget)
        with redirect_stdout(StringIO()):
            args = launch.prepare(shlex.split(f"{REST} {job.flags}"), patched, "gpt")
        built = [*_built(args)]
        try:
            return (*_by_rank(args, built), *_by_words(job, args))
        except ValueError as error:
            return (f"the planner refuses it: {error}",)


def _by_rank(args: Namespace, built: Sequence[tuple[int, int, Sizes]]) -> Iterator[str]:
    expected = _counted(args)
    for rank, stage, sizes in built:
        if sizes != expected[stage]:
            yield f"rank {rank}, stage {stage}: {expected[stage]}, built {sizes}"


def _counted(args: Namespace) -> list[Sizes]:
    """Return what the planner counts, of one GPU, for each stage."""
    shape, setup = shape_of(args), setup_of(args, args.data_parallel_size)
    setup.check(shape)
    return [
        Sizes(
            held.dense,
            held.experts,
            (held.dense + held.experts) * setup.element_bytes,
            held.dense * setup.gradient_bytes,
            held.experts * setup.gradient_bytes,
        )
        for held in held_parameters(shape, setup, stage_layers(args))
    ]


def _by_words(job: Job, args: Namespace) -> Iterator[str]:
    """Yield a line if the flags as words, which `fold3d search` reads, say something else."""
    words, setup = described(job.flags.split()), setup_of(args, args.data_parallel_size)
    given, tp = words.given(), setup.tensor_parallel
    of_experts = given.get("expert_tensor_parallel") or tp, words.args.expert_model_parallel_size
    as_words, validated = (
        (*shape.padded(tp).stage_parameters(1), *shape.padded(tp).stage_flops(1), *rest)
        for shape, *rest in (
            (words.model(), *of_experts, given["small_gradients"]),
            (shape_of(args), *setup.expert_ranks, setup.small_gradients),
        )
    )
    if as_words != validated:
        yield f"words say {as_words}, Megatron {validated}"


def _built(args: Namespace) -> Iterator[tuple[int, int, Sizes]]:
    """Yield the number, a stage and what is built of it, for the first and last ranks of stages."""
    from megatron.core import mpu
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    from megatron.fold3d.training import gpt

    config = pretrain_cfg_container_from_args(args, gpt.config(args))
    pp = args.pipeline_model_parallel_size
    of_rank = args.world_size // pp
    ends = chain.from_iterable((n * of_rank, (n + 1) * of_rank - 1) for n in range(pp))
    for rank in dict.fromkeys(ends):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=args.world_size)
        try:
            mpu.initialize_model_parallel(
                args.tensor_model_parallel_size,
                pp,
                args.virtual_pipeline_model_parallel_size,
                context_parallel_size=args.context_parallel_size,
                expert_model_parallel_size=args.expert_model_parallel_size,
                expert_tensor_parallel_size=args.expert_tensor_parallel_size,
                create_gloo_process_groups=False,
            )
            model_parallel_cuda_manual_seed(1, force_reset_rng=True)
            builder = config.model.get_builder_cls()(config.model)
            with redirect_stdout(StringIO()):
                chunks = builder.build_distributed_models(
                    pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
                    ddp_config=config.ddp,
                    data_parallel_random_init=False,
                )
            for segment, chunk in enumerate(chunks):
                yield rank, segment * pp + rank // of_rank, _sizes(chunk)
        finally:
            mpu.destroy_model_parallel()
            dist.destroy_process_group()


def _sizes(chunk: torch.nn.Module) -> Sizes:
    """Return what a model chunk holds, without what makes shards of its buffers equally large."""
    of_dense, of_experts = (
        [p for p in chunk.parameters() if getattr(p, "allreduce", True) is dense]
        for dense in (True, False)
    )

    return Sizes(
        *(sum(p.numel() for p in parameters) for parameters in (of_dense, of_experts)),
        sum(p.nbytes for p in (*of_dense, *of_experts)),
        *(sum(p.main_grad.nbytes for p in parameters) for parameters in (of_dense, of_experts)),
    )


def _forget() -> None:
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.training.global_vars import destroy_global_vars

    destroy_global_vars()
    destroy_num_microbatches_calculator()


def main() -> int:
    """Return 1 if anything differs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--seed", default="0")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    started, wrong = time.monotonic(), 0
    for job, differences in compared(options.seed, options.jobs):
        if differences:
            wrong += 1
            print(f"{job.num_gpus} GPUs: {job.flags}", *differences, sep="\n  ", flush=True)
    took_s = time.monotonic() - started
    print(f"seed {options.seed}: {options.jobs} jobs in {took_s:.0f} s, {wrong} differ", flush=True)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
