"""The frozen configuration of a run, from our flags and Megatron's after all checks.

`config/read_config.py` makes it. Code that only runs a configuration need not load the flags.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megatron.fold3d.plan.choice import Choice, file_of, free_values
from megatron.fold3d.plan.compile import Job
from megatron.fold3d.plan.schedules import SPLIT_SCHEDULES

Device = Literal["cuda", "cpu"]
Switch = Literal["off", "auto", "on"]

# A slice has to take much longer than its launch, and much less than an activation's transfer.
SLICE_BYTES: dict[Device, int] = {"cuda": 8 << 20, "cpu": 1 << 19}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold3DConfig:
    """One run's choices.

    Attributes:
        job: the job from which plans are made, for any number of micro-batches. Choices that depend
            on measured times have their defaults.
        auto: the keys of the word whose values measured times choose.
        num_replicas: the most ranks that hold the same parameters; 0 if not known.
        recompute_layers: how many layers each stage recomputes; None follows Megatron's flags.
        auto_recompute_layers: whether measured bytes choose ``recompute_layers``.
        recomputes_means: whether recomputations update means over an iteration's micro-batches.
        activation_memory_bytes: with ``auto_recompute_layers``, the limit of saved activations on a
            rank; None takes the GPU's free memory. With offload, their host memory in the first
            iteration; None follows from ``saved_bytes``.
        clips_or_scales: whether Megatron may clip gradients, or skip a step over their norm or a
            loss scale.
        trace_iterations: the iterations to record; None records two after warm-up.
        microbatch_flops: FLOPs of the model's forward and backward, for the trace; 0 if unknown.
        recomputed_flops: FLOPs of a backward's recomputation, for the trace; 0 if unknown.
        ties_embeddings: whether the first and the last stage hold the same word embeddings.
        keeps_forwards: whether stock's order of forwards has to be kept, as with dropout.
        keeps_sums: whether stock's sums over replicas have to be kept bit for bit.
        offload_everything: whether all large saved tensors are offloaded, or only the inputs of
            recomputation.
        saved_bytes: a lower bound on what one micro-batch's forward of a stage saves; 0 if unknown.
        distributed_timeout_minutes: how long a transfer may take before the job ends.
    """

    job: Job
    device: Device
    distributed_timeout_minutes: float
    auto: Set[str] = frozenset()
    has_engine_modules: bool = False
    recompute_layers: tuple[int, ...] | None = None
    auto_recompute_layers: bool = False
    recomputes_means: bool = False
    activation_memory_bytes: int | None = None
    num_replicas: int = 0
    clips_or_scales: bool = False
    trace: Path | None = None
    trace_iterations: range | None = None
    records_tp_sync: bool = False
    microbatch_flops: float = 0.0
    recomputed_flops: float = 0.0
    offload_activations: Switch = "off"
    lazy_inter_segment: bool = False
    offload_everything: bool = False
    cuts_every_segment: bool = False
    ties_embeddings: bool = False
    keeps_forwards: bool = False
    keeps_sums: bool = False
    preemptive_comm: bool = False
    traffic_class: Mapping[str, int] = field(default_factory=dict)
    saved_bytes: int = 0
    delta_param_gather: Switch = "off"
    coded_grad_reduce: Switch = "off"

    @property
    def choice(self) -> Choice:
        """The choice that the flags give."""
        return self.job.choice

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks: Megatron's ``--pipeline-model-parallel-size``."""
        return self.job.num_ranks

    @property
    def num_segments(self) -> int:
        """Model chunks per pipeline rank; 0 if only a checkpoint knows their number."""
        return len(self.choice.segments)

    @property
    def plan_file(self) -> Path | None:
        """The file of ``--schedule plan=FILE``; None with other orders."""
        return file_of(self.choice.order)

    @property
    def slice_bytes(self) -> int:
        """Bytes of gradients in one slice of DP.sync."""
        return self.choice.slice_bytes or SLICE_BYTES[self.device]

    @property
    def early_stages(self) -> tuple[int, ...]:
        """The stages that recompute before their gradients arrive."""
        return self.choice.stages(self.num_ranks, recompute="early")

    @property
    def apart(self) -> tuple[int, ...]:
        """The segments whose backwards leave weight gradients to separate actions."""
        if self.choice.order in SPLIT_SCHEDULES:
            return (0,)
        segments = enumerate(self.choice.segments)
        return tuple(number for number, segment in segments if segment.wgrad != "backward")

    @property
    def measuring_flag(self) -> str:
        """The setting that leaves a part of the choice to measured times; empty if none does."""
        if self.choice.order == "auto":
            return "--schedule auto"
        flags = {"share": "step=next", "optimizer": "optimizer=auto", "ahead": "ahead=auto"}
        flags["wgrad"] = "wgrad=gaps"
        return next((flag for key, flag in flags.items() if key in self.auto), "")

    def free(self) -> dict[str, tuple[str, ...]]:
        """Return the values from which measured times choose, by key of a segment."""
        cuts = self.choice.order != "auto" or self.may_cut_sums
        free = free_values(
            defers="step" in self.auto and cuts,
            delays="wgrad" in self.auto,
            replicates="optimizer" in self.auto and cuts,
            reduces_early=self.job.reduces_early,
        )
        return free | ({"wgrad": ("backward", "gaps")} if self.choice.fills_gaps else {})

    @property
    def may_cut_sums(self) -> bool:
        """True if ``auto`` may cut gradients into other slices than stock.

        Sums over two replicas are the same in any order; over more, they are equal up to rounding.
        """
        return self.num_replicas == 2 or (self.num_replicas > 2 and not self.keeps_sums)
