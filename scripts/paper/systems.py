"""The systems of the paper and ours, by name: the one table of their flags.

    python -m scripts.paper.systems fold3d --segments 4 --ranks 8 -- --global-batch-size 64

prints the flags of a run, one a line, for `scripts/slurm/run.sh`. Benchmarks and the simulator
read the same rows. The job itself (model, batch, layout, precision) is not here.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

CHUNKS = 2
"""Model chunks of the paper's Megatron, chosen there by trials: they explain its bubbles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a system's flags depend on, and what may rule it out."""

    pipeline_ranks: int
    segments: int
    microbatches: int
    sequences: int = 1
    """Of a batch, for each GPU."""
    fp16: bool = False
    on_cpu: bool = False

    @classmethod
    def of(cls, flags: Sequence[str], *, ranks: int, segments: int) -> Self:
        """Return the layout that a job's flags say; the last of each counts, as in Megatron."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
        parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
        parser.add_argument("--micro-batch-size", type=int, default=1)
        parser.add_argument("--global-batch-size", type=int, default=ranks)
        parser.add_argument("--fp16", action="store_true")
        parser.add_argument("--device")
        args, _ = parser.parse_known_args(flags)
        pp = args.pipeline_model_parallel_size
        replicas = max(1, ranks // (pp * args.tensor_model_parallel_size))
        return cls(
            pipeline_ranks=pp,
            segments=segments,
            microbatches=args.global_batch_size // (args.micro_batch_size * replicas),
            sequences=max(1, args.global_batch_size // ranks),
            fp16=args.fp16,
            on_cpu=args.device == "cpu",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A way to train the same job.

    Attributes:
        flags: of the training script; names in braces are of the layout.
        candidate: the fields of a simulated `Candidate`, with the word of its choice; empty for
            what is no pipeline.
        serial: whether all DP.sync is simulated behind all computation.
        chunks: its number of model chunks, whatever the layout's.
    """

    about: str
    flags: str
    candidate: Mapping[str, Any] = field(default_factory=dict)
    serial: bool = False
    chunks: int | None = None

    def refusal(self, layout: Layout) -> str | None:
        """Return why it cannot run a layout, or None."""
        if not self.candidate and layout.fp16:
            return "no fp16 in Megatron's FSDP2; use GPUs that have bf16"
        if not self.candidate and layout.on_cpu:
            return "Megatron's FSDP2 asks for a mesh of GPUs"
        if layout.pipeline_ranks == 1 and self.segments(layout) > 1:
            return "Megatron cuts layers into chunks in a pipeline only; give 2 ranks or more"
        return None

    def segments(self, layout: Layout) -> int:
        """Return its model chunks per rank."""
        return self.chunks or layout.segments

    def words(self, layout: Layout) -> tuple[str, ...]:
        """Return its flags.

        Raises:
            ValueError: it cannot run this layout.
        """
        if reason := self.refusal(layout):
            raise ValueError(reason)
        sizes = asdict(layout) | {"segments": self.segments(layout)}
        return tuple(self.flags.format(**sizes).split())


_CHUNKS = "--num-virtual-stages-per-pipeline-rank {segments}"
_ONE_GROUP = "--microbatch-group-size-per-virtual-pipeline-stage {microbatches}"
_SHARDED = "--use-distributed-optimizer --overlap-param-gather"
_AIAO = "--segments {segments} --overlap-grad-reduce --schedule aiao"
_SPLIT = ":step=next"
_OFFLOAD = "--offload-activations auto"
_PREEMPT = "--preemptive-comm"


def _ours(*features: str, word: str = "aiao", **candidate: Any) -> System:
    about = {_SPLIT: "DP.sync reaches into the next forward", _PREEMPT: "PP.sync preempts DP.sync"}
    about[_OFFLOAD] = "checkpoints wait in host memory"
    return System(
        about="; ".join(["AIAO's order", *map(about.__getitem__, features)]),
        flags=" ".join((_AIAO, *features)).replace(f" {_SPLIT}", _SPLIT),
        candidate={"word": word} | candidate,
    )


SYSTEMS = {
    "megatron": System(
        about="the paper's Megatron: interleaved, all DP.sync behind it",
        flags=_CHUNKS,
        candidate={"word": "stock"},
        serial=True,
        chunks=CHUNKS,
    ),
    "megatron-best": System(
        about="stock with all that overlaps: breadth-first chunks, shards of the optimizer",
        flags=f"{_CHUNKS} {_ONE_GROUP} --overlap-p2p-communication-warmup-flush "
        f"--overlap-grad-reduce {_SHARDED}",
        candidate={"word": "stock", "breadth_first": True},
    ),
    "dspeed3d": System(
        about="the paper's DeepSpeed 3D: 1F1B and ZeRO-1, nothing overlaps",
        flags="--use-distributed-optimizer",
        candidate={"word": "stock"},
        serial=True,
        chunks=1,
    ),
    "zero3": System(
        about="ZeRO-3 as Megatron's FSDP2: no pipeline, no tensor parallelism, untied embeddings",
        flags="--use-torch-fsdp2 --ckpt-format torch_dist --no-gradient-accumulation-fusion "
        "--untie-embeddings-and-output-weights "
        "--pipeline-model-parallel-size 1 --tensor-model-parallel-size 1 "
        "--micro-batch-size {sequences}",
        chunks=1,
    ),
    "aiao": _ours(),
    "aiao+split": _ours(_SPLIT, word=f"aiao{_SPLIT}"),
    "aiao+offload": _ours(_OFFLOAD, offload=True),
    "aiao+preempt": _ours(_PREEMPT, preemptive=True),
    "fold3d": _ours(
        *(_SPLIT, _OFFLOAD, _PREEMPT), word=f"aiao{_SPLIT}", offload=True, preemptive=True
    ),
    "auto": System(
        about="what we recommend: the run chooses the order, and starts in stock's",
        flags=f"--schedule auto --segments {{segments}} --overlap-grad-reduce {_SHARDED} "
        f"{_ONE_GROUP}",
        candidate={"word": "auto"},
    ),
}
"""By name; flags of ours are those of ours alone."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the flags of the system that the command line names, or why it cannot run."""
    table = "\n".join(f"  {name:14}{system.about}" for name, system in SYSTEMS.items())
    parser = argparse.ArgumentParser(
        prog="python -m scripts.paper.systems",
        description=(__doc__ or "").partition("\n")[0],
        epilog=f"Behind -- follow the job's flags: its layout and batch.\n\nsystems:\n{table}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="SYSTEM")
    parser.add_argument("--segments", type=int, default=4, metavar="N", help="(4)")
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="of the job (4)")
    words = sys.argv[1:] if argv is None else list(argv)
    at = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:at])
    if args.name not in SYSTEMS:
        parser.error(f"{args.name} is no system; choose from {', '.join(SYSTEMS)}")
    layout = Layout.of(words[at + 1 :], ranks=args.ranks, segments=args.segments)
    try:
        print("\n".join(SYSTEMS[args.name].words(layout)))
    except ValueError as reason:
        print(f"{args.name} cannot run here: {reason}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
