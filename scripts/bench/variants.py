"""What is compared: one job, and the flags by which its variants differ."""

import tomllib
from argparse import Namespace, _ActionsContainer
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from scripts.paper.systems import SYSTEMS, Layout

_DISTRIBUTED_OPTIMIZER = "--use-distributed-optimizer"
PRECISIONS = {"fp32": (), "bf16": ("--bf16",), "bf16-grads": ("--bf16", "--grad-reduce-in-bf16")}
"""Flags of the weights, and of the gradients that replicas add up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The training that all variants do: the same model, batch, precision and recompute."""

    num_ranks: int = 2  # of a pipeline
    data_parallel: int = 2
    tensor_parallel: int = 1
    num_microbatches: int = 8
    num_layers: int = 16
    hidden_size: int = 256
    seq_length: int = 32
    micro_batch_size: int = 1
    num_iterations: int = 12
    clip_grad: float = 1.0
    recompute: bool = False
    untied: bool = False  # word embeddings of their own at both ends
    vocab_size: int = 127
    precision: str = "fp32"  # one of `PRECISIONS`

    def __post_init__(self) -> None:
        sizes = {"pp": self.num_ranks, "dp": self.data_parallel, "layers": self.num_layers}
        for flag, size in sizes.items():
            if size < 1:
                raise ValueError(f"--{flag} {size}: it is at least one")
        if self.precision not in PRECISIONS:
            known = ", ".join(PRECISIONS)
            raise ValueError(f"--precision {self.precision}: it is one of {known}")
        if self.num_layers % self.num_ranks:
            nearest = max(1, self.num_layers // self.num_ranks) * self.num_ranks
            raise ValueError(
                f"--layers {self.num_layers} is not divisible by --pp {self.num_ranks}; "
                f"try --layers {nearest}"
            )

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return self.num_ranks * self.data_parallel * self.tensor_parallel

    @property
    def segment_counts(self) -> list[int]:
        """The numbers of segments, above one, into which a rank's layers can be cut evenly."""
        if self.num_ranks == 1:
            return []  # Megatron cuts a rank's layers in a pipeline only
        layers = self.num_layers // self.num_ranks
        return [count for count in range(2, layers + 1) if layers % count == 0]

    @property
    def group_sizes(self) -> list[int]:
        """The micro-batch groups that Megatron takes: depth-first is first, breadth-first last."""
        total = self.num_microbatches
        return [size for size in range(self.num_ranks, total + 1) if total % size == 0]

    @property
    def loss_tolerance(self) -> float:
        """By how much losses of two variants may differ over a handful of small updates.

        They add up the same numbers in another order.
        """
        return 1e-5 if self.precision == "fp32" else 1e-3

    def flags(self) -> list[str]:
        """Spell the job for ``pretrain_gpt.py``."""
        flags = {
            "device": "cpu",
            "pipeline-model-parallel-size": self.num_ranks,
            "tensor-model-parallel-size": self.tensor_parallel,
            "num-layers": self.num_layers,
            "hidden-size": self.hidden_size,
            "num-attention-heads": max(1, self.hidden_size // 64),
            "seq-length": self.seq_length,
            "max-position-embeddings": self.seq_length,
            "micro-batch-size": self.micro_batch_size,
            "global-batch-size": (
                self.num_microbatches * self.data_parallel * self.micro_batch_size
            ),
            "train-iters": self.num_iterations,
            "tokenizer-type": "NullTokenizer",
            "vocab-size": self.vocab_size,
            "attention-dropout": 0,
            "hidden-dropout": 0,
            "clip-grad": self.clip_grad,
            "lr": 1e-4,
            "lr-decay-style": "constant",
            "num-workers": 0,
            "log-interval": 1,
            "eval-iters": 0,
            "eval-interval": 1000,
            "distributed-timeout-minutes": 3,
        }
        if self.recompute:
            flags |= {"recompute-granularity": "full", "recompute-method": "uniform"}
            flags |= {"recompute-num-layers": 1}
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        untied = ["--untie-embeddings-and-output-weights"] if self.untied else []
        return [*words, *untied, *PRECISIONS[self.precision], "--mock-data"]


_OPTIONS = {
    "pp": ("num_ranks", "ranks of a pipeline"),
    "dp": ("data_parallel", "replicas of a pipeline"),
    "tp": ("tensor_parallel", "tensor-parallel ranks of a stage"),
    "layers": ("num_layers", "of the model"),
    "hidden": ("hidden_size", "of a layer"),
    "seq_length": ("seq_length", "tokens of a sequence"),
    "microbatches": ("num_microbatches", "per iteration and pipeline"),
    "micro_batch_size": ("micro_batch_size", "sequences of one"),
    "clip_grad": ("clip_grad", "the norm to which gradients are clipped"),
    "recompute": ("recompute", "recompute every layer"),
    "untied": ("untied", "untie the word embeddings"),
    "vocab_size": ("vocab_size", "Megatron pads it"),
    "precision": ("precision", f"one of {', '.join(PRECISIONS)}"),
    "iterations": ("num_iterations", "of each run"),
}
"""Options of a command line: the field of a job that each sets, and its help."""


def add_job_options(parser: _ActionsContainer, job: Job) -> None:
    """Add options whose defaults are a job's."""
    for name, (field, what) in _OPTIONS.items():
        flag, default = f"--{name.replace('_', '-')}", getattr(job, field)
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true", help=what)
        else:
            parser.add_argument(
                flag, type=type(default), default=default, help=f"{what} ({default})"
            )


def job_of(args: Namespace, job: Job) -> Job:
    """Return the job with what the options of `add_job_options` say."""
    return replace(job, **{field: getattr(args, name) for name, (field, _) in _OPTIONS.items()})


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run the job."""

    name: str
    flags: tuple[str, ...]
    checkout: Path | None = None  # of another commit, with a .venv of its own

    @property
    def is_stock(self) -> bool:
        """Whether Megatron's own schedule runs."""
        return "--schedule" not in self.flags

    @property
    def is_distributed_optimizer(self) -> bool:
        """Whether gradients are reduce-scattered and parameters gathered."""
        return _DISTRIBUTED_OPTIMIZER in self.flags


DEFAULT = Variant("stock-default", ())  # 1F1B, and nothing overlaps: the weakest that is compared


def known(job: Job) -> Iterator[Variant]:
    """Yield stock's default, systems by name, a sweep with stock's strongest, and ours."""
    yield DEFAULT
    yield from _by_name(job)
    yield Variant("stock-default-do", (_DISTRIBUTED_OPTIMIZER,))
    yield from _with_optimizers("stock-1f1b-overlap", ("--overlap-grad-reduce",))
    for segments in job.segment_counts:
        for group in job.group_sizes:
            interleaved = (
                *("--num-virtual-stages-per-pipeline-rank", str(segments)),
                *("--microbatch-group-size-per-virtual-pipeline-stage", str(group)),
                "--overlap-p2p-communication-warmup-flush",
                "--overlap-grad-reduce",
            )
            name = f"stock-v{segments}-n{group}"
            yield from _with_optimizers(name, interleaved)
            yield from _with_optimizers(f"{name}-noalign", (*interleaved, "--no-align-grad-reduce"))
    for segments in [1, *job.segment_counts]:
        aiao = ("--schedule", "aiao", "--segments", str(segments), "--overlap-grad-reduce")
        yield from _with_optimizers(f"aiao-s{segments}", aiao)
        if segments > 1:
            yield Variant(f"aiao-s{segments}-auto", with_parts(aiao, ":step=next"))


def with_parts(flags: tuple[str, ...], parts: str) -> tuple[str, ...]:
    """Return flags of ours with further parts of the word that ``--schedule`` takes."""
    at = flags.index("--schedule") + 1
    return (*flags[:at], flags[at] + parts, *flags[at + 1 :])


def _by_name(job: Job) -> Iterator[Variant]:
    """Yield the systems that can run the job, in the largest number of segments."""
    layout = Layout(
        pipeline_ranks=job.num_ranks,
        segments=max(job.segment_counts, default=1),
        microbatches=job.num_microbatches,
    )
    for name, system in SYSTEMS.items():
        if system.candidate and not system.refusal(layout):  # others change the job's layout
            yield Variant(name, system.words(layout))


def _with_optimizers(name: str, flags: tuple[str, ...]) -> Iterator[Variant]:
    yield Variant(name, flags)
    yield Variant(f"{name}-do", (*flags, _DISTRIBUTED_OPTIMIZER, "--overlap-param-gather"))


def read(path: Path) -> list[Variant]:
    """Variants of a TOML file, a line each: ``name = "flags"``.

    Raises:
        ValueError: the file is not of this form.
    """
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"--variants {path}: {error}") from None
    for name, flags in table.items():
        if not isinstance(flags, str):
            raise ValueError(f'--variants {path}: {name} is no text; write {name} = "--flag ..."')
    return [Variant(name, tuple(flags.split())) for name, flags in table.items()]


def choose(
    variants: Sequence[Variant], patterns: Sequence[str], distributed_optimizer: bool | None
) -> list[Variant]:
    """Pick variants by name, in their own order; stock's default always comes first.

    Raises:
        ValueError: a pattern names none of them.
    """
    names = [variant.name for variant in variants]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"no variant is called {pattern}; there are {', '.join(names)}")
    chosen = [
        variant
        for variant in variants
        if variant != DEFAULT
        and any(fnmatchcase(variant.name, pattern) for pattern in patterns)
        and distributed_optimizer in (None, variant.is_distributed_optimizer)
    ]
    return [DEFAULT, *chosen]
