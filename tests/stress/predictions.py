"""Random jobs, each predicted in three ways that have to agree.

`--check` reads Megatron's validated namespace; `fold3d simulate` reads the same flags as words, or
their short forms. All predict the time of an iteration and the memory of each pipeline rank.

    .venv/bin/python -m tests.stress.predictions --seed 7 --jobs 200
"""

import argparse
import contextlib
import io
import json
import random
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from fold3d_patches import check_schedule
from megatron.fold3d.cli import main as fold3d
from megatron.fold3d.config.all_flags import add_arguments, megatron_defaults
from megatron.fold3d.config.read_config import read_config
from megatron.fold3d.plan.schedule_word import Part, Word
from megatron.fold3d.plan.schedules import ONE_SEGMENT_SCHEDULES, SPLIT_SCHEDULES
from megatron.fold3d.predict.cost_model.cluster import cluster as named_cluster
from megatron.fold3d.training.dry_run import planned

_CLUSTER = """
num_nodes = {gpus}
gpus_per_node = 1
gpu_flops_per_s = 312e12
gpu_memory_bytes = 160e9
nic_bytes_per_s = {nic}
intra_bytes_per_s = 3e11
host_copy_bytes_per_s = 2e10
host_memory_bytes = 1e13
nic_latency_s = 5e-6
"""
_MODEL = (
    "--tokenizer-type NullTokenizer --vocab-size 51199 --mock-data --lr 1e-4 --train-iters 9 "
    "--eval-interval 9 --bf16 --transformer-impl local --attention-dropout 0 --hidden-dropout 0 "
    "--no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion"
)
_ORDERS = ("stock", "aiao", "aiao", "afab", "interleaved", "1f1b", "breadth-first", "zb-h1")
_SHARDED = "--use-distributed-optimizer --overlap-param-gather"
_FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@dataclass(frozen=True, slots=True)
class Job:
    """A job as `--check` and as `fold3d simulate` are told of it.

    Attributes:
        flags: of training.
        short: the same in short forms.
        cluster: the text of a cluster's file.
        gpus: all ranks.
    """

    flags: str
    short: str
    cluster: str
    gpus: int


def draw(dice: random.Random) -> Job:
    """Return a job; one in some is refused, by both."""
    ranks, replicas = dice.choice((1, 2, 2, 4)), dice.choice((1, 2, 2, 4))
    order = dice.choice(_ORDERS)
    segments = 1 if order in ONE_SEGMENT_SCHEDULES or ranks == 1 else dice.choice((1, 2, 3, 4))
    each = dice.choice((1, 2, 3))  # layers of a stage
    layers, hidden, length = each * ranks * segments, dice.choice((1024, 2048)), 1024
    microbatches, size = dice.randint(ranks, 3 * ranks + 2), dice.choice((1, 2))
    if order == "stock":
        microbatches = ranks * dice.randint(1, 4)
    sharded = replicas > 1 and segments > 1 and dice.random() < 0.5
    recomputes = order != "stock" and dice.random() < 0.3
    word, shards = _word(order, (ranks, segments, replicas), sharded, recomputes, dice)
    flags = [
        *(_MODEL, f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads 16"),
        f"--seq-length {length} --max-position-embeddings {length} --schedule {word}",
        f"--pipeline-model-parallel-size {ranks} --segments {segments}",
        f"--micro-batch-size {size} --global-batch-size {microbatches * replicas * size}",
    ]
    short = [
        f"--schedule {word} --pp {ranks} --segments {segments} --micro-batch-size {size}",
        f"--model {layers}-{hidden}-16-{length} --transformer-impl local",
    ]
    if word.parts or sharded or dice.random() < 0.7:
        flags.append("--overlap-grad-reduce")
        short.append(f"--microbatches {microbatches}")
    else:
        short.append(f"--global-batch-size {microbatches * replicas * size}")
    if sharded:
        flags.append(_SHARDED)
        short.append("--use-distributed-optimizer")
    both = []
    if recomputes and each > 1 and dice.random() < 0.5:
        counts = ",".join(str(dice.randint(0, each)) for _ in range(ranks * segments))
        both.append(f"--recompute-layers {counts}")
    elif recomputes:
        flags.append(_FULL)
        short.append("--recompute full")
    if shards:
        both.append("--shard-segments weights")
    gpus = ranks * replicas
    cluster = _CLUSTER.format(gpus=gpus, nic=dice.choice((3e9, 6.25e9, 2.5e10)))
    return Job(" ".join([*flags, *both]), " ".join([*short, *both]), cluster, gpus)


def _word(
    order: str, sizes: tuple[int, int, int], sharded: bool, recomputes: bool, dice: random.Random
) -> tuple[Word, bool]:
    """Return a word, and whether segments are sharded; sizes are ranks, segments and replicas."""
    ranks, segments, replicas = sizes
    some = tuple(sorted(dice.sample(range(segments), dice.randint(1, segments))))
    parts, shards, defers = [], False, False
    if order == "stock":
        return Word(order), False
    if sharded and dice.random() < 0.3:
        ends = {0, segments - 1}  # whose embeddings are tied
        if ends <= {*some} or not ends & {*some} or ranks == 1:
            parts.append(Part("optimizer", "replicated", some))
    elif sharded and dice.random() < 0.3:
        shards = True
    elif replicas > 1 and dice.random() < 0.3:
        defers = True
        parts.append(Part("step", "next"))
    if order not in SPLIT_SCHEDULES and not recomputes and dice.random() < 0.4:
        behind = replicas > 1 and not shards and not (defers and sharded)
        place = "behind" if behind and not (defers and dice.random() < 0.5) else "last"
        if replicas > 1 or place == "last":
            parts.append(Part("wgrad", place, some))
    elif recomputes and dice.random() < 0.5:
        parts.append(Part("recompute", "early", some))
    if order in ("1f1b", "aiao", "interleaved") and dice.random() < 0.3:
        parts.append(Part("ahead", str(dice.randint(1, 3))))
    if order == "interleaved" and dice.random() < 0.5:
        parts.append(Part("group", str(dice.randint(ranks, 2 * ranks))))
    return Word(order, tuple(parts)), shards


def of_check(job: Job, parser: ArgumentParser, cluster: Path) -> tuple[float, list[float]]:
    """Return seconds and peaks in bytes, from Megatron's validated flags.

    Raises:
        ValueError: the job is refused.
    """
    from megatron.training.arguments import validate_args

    args = parser.parse_args(job.flags.split())
    args.rank, args.world_size, args.check = 0, job.gpus, str(cluster)
    read_config(args)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints all arguments
        validate_args(args, megatron_defaults(args))
    config = read_config(args)
    batch = args.micro_batch_size * args.data_parallel_size
    check_schedule(config, args.global_batch_size // batch)
    run = planned(args, config, named_cluster(str(cluster)))
    found = run.simulated()
    return found.seconds, run.peaks(found)


def of_simulate(words: Sequence[str], cluster: Path) -> tuple[float, list[float]]:
    """Return seconds and peaks in bytes, from words.

    Raises:
        ValueError: the job is refused.
    """
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        fold3d(["simulate", "--cluster", str(cluster), "--json", *words])
    if not out.getvalue():
        raise ValueError(err.getvalue())
    found = json.loads(out.getvalue())
    return found["period_s"], found["peak_bytes"]


def difference(job: Job, parser: ArgumentParser, folder: Path) -> str:
    """Return how the predictions of a job differ; empty if they agree to nine digits."""
    cluster = folder / "cluster.toml"
    cluster.write_text(job.cluster)
    found: dict[str, tuple[float, list[float]] | str] = {}
    for name, predicted in (
        ("--check", lambda: of_check(job, parser, cluster)),
        ("simulate", lambda: of_simulate(job.short.split(), cluster)),
        ("simulate -- FLAGS", lambda: of_simulate(["--", *job.flags.split()], cluster)),
    ):
        try:
            found[name] = predicted()
        except ValueError as error:
            found[name] = str(error)
    if all(isinstance(each, str) for each in found.values()):
        return ""
    alike = {_rounded(each) for each in found.values()}
    return "" if len(alike) == 1 else "; ".join(f"{name}: {each}" for name, each in found.items())


def _rounded(found: tuple[float, list[float]] | str) -> object:
    if isinstance(found, str):
        return "refused"
    seconds, peaks = found
    return tuple(f"{value:.8e}" for value in (seconds, *peaks))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the jobs whose predictions differ; returns 1 if there is one."""
    from megatron.training.arguments import add_megatron_arguments

    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--jobs", type=int, default=200)
    args = options.parse_args(argv)
    parser = ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    add_arguments(parser)
    dice, wrong = random.Random(args.seed), 0
    with TemporaryDirectory() as folder:
        for number in range(args.jobs):
            job = draw(dice)
            if told := difference(job, parser, Path(folder)):
                wrong += 1
                print(f"job {number}: {told}\n  {job.flags}\n  fold3d simulate {job.short}")
    print(f"seed {args.seed}: {args.jobs} jobs, {wrong} differ")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
