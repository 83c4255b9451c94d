"""The frozen configuration of a run, from our flags and Megatron's, once they are checked.

`config/read_config.py` makes it. Code that only runs a configuration need not load the flags.
"""

from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from megatron.fold3d.plan.choice import Choice, free_values
from megatron.fold3d.plan.compile import Features
from megatron.fold3d.plan.schedules import SPLIT_SCHEDULES

Device = Literal["cuda", "cpu"]
Offload = Literal["off", "auto", "on"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold3DConfig:
    """One run's choices.

    Attributes:
        schedule: a name of `plan.schedules.SCHEDULES`, ``auto``, ``stock`` or ``plan-file``.
        plan_file: the plan to run; given with ``plan-file`` only.
        num_ranks: pipeline ranks: Megatron's ``--pipeline-model-parallel-size``.
        num_segments: model chunks per pipeline rank, from whichever flag says so.
        backward_share: share of DP.sync, from 0 to 1, that starts during the backwards; the rest,
            and what they do not hide, runs in the next iteration. None ends DP.sync with the
            iteration.
        auto_share: whether measured times replace ``backward_share``.
        dp_slice_bytes: bytes of gradients that a deferring run reduces at once.
        auto_slices: whether preemption may choose smaller slices.
        delay_weight_grads: the segments whose weight gradients are split from their backwards;
            unless the order itself places them, they follow all backwards.
        behind_backwards: of these, the ones that follow their segment's own backwards, and between
            which DP.sync starts.
        has_engine_modules: whether the model's layers are Transformer Engine's.
        forwards_ahead: forwards that 1F1B runs ahead per rank behind; None is the schedule's own.
        auto_ahead: whether measured times choose ``forwards_ahead``.
        auto_weight_grads: whether measured times say where weight gradients go, if apart at all.
        most_activations: the limit of a rank with ``auto_weight_grads``; None adds nothing.
        recompute_early: the stages that recompute before their gradients arrive.
        recompute_layers: how many layers each stage recomputes; None is Megatron's one number.
        auto_recompute_layers: whether measured bytes choose these numbers.
        recomputes_means: whether recomputations update means over an iteration's micro-batches.
        activation_memory_bytes: what saved activations may then take on a rank; None is what the
            GPU has left. Or the host memory that they have in the first iteration with offload;
            None is what ``saved_bytes`` gives.
        overlap_tensor_parallel: whether neighbouring micro-batches run in pairs, each during the
            other's tensor-parallel collectives.
        overlap_grad_reduce: whether DDP's hooks reduce gradients inside a stage's last backward.
        parameter_share: bytes of a parameter, as a share of those of its gradient.
        clips_or_scales: whether Megatron may clip gradients, or skip a step over their norm or a
            loss scale.
        trace: the folder that a trace is written to.
        trace_iterations: the iterations that are recorded; None is two after warm-up.
        records_tp_sync: whether a trace has tensor-parallel collectives.
        microbatch_flops: FLOPs of the model's forward and backward, for the trace; 0 if unknown.
        recomputed_flops: of what a backward computes again, likewise.
        cuts_every_segment: whether every segment's gradients are reduced in buckets.
        slices_dp_sync: whether the plan starts DP.sync in slices, one before each computation.
        reduces_early: whether DP.sync may start between delayed weight gradients.
        receives_late: whether receives are posted where they hold up nothing in a hardware queue
            that all streams share.
        receives_ahead: how many computations ahead receives are posted that are not late.
        steps_shards: whether the optimizer is distributed: each replica steps a shard.
        gathers_params: whether the plan gathers parameters that are updated in shards.
        shards_params: whether a segment's parameters are whole only while it computes.
        replicated_segments: those that every replica steps in full, beside others in shards.
        ties_embeddings: whether the first and the last stage share word embeddings.
        auto_defers: whether ``auto`` may let DP.sync reach into the next iteration.
        auto_delays: whether it may compute weight gradients apart from their backwards.
        auto_replicates: whether it, or ``optimizer=auto``, may let every replica step
            some segments in full.
        keeps_forwards: whether it has to keep stock's order of forwards, as with dropout.
        keeps_sums: whether it has to keep stock's sums over replicas bit for bit.
        shards_grads: whether a replica keeps its shard alone of a segment's reduced gradients.
        preemptive_comm: whether transfers between pipeline ranks go before DP.sync.
        pp_traffic_class: marks PP.sync's packets.
        dp_traffic_class: marks DP.sync's packets.
        device: the device that Megatron trains on.
        offload_activations: whether saved activations go to host memory.
        lazy_inter_segment: whether transfers between segments wait in host memory.
        offload_everything: whether all large saved tensors are offloaded, not only those that
            recomputation starts from.
        saved_bytes: a lower bound on what one micro-batch's forward of a stage saves; 0 if unknown.
        microbatch_group_size: micro-batches per group of ``interleaved``; None is one per rank.
        distributed_timeout_minutes: how long a transfer may take before the job ends.
    """

    schedule: str
    plan_file: Path | None
    num_ranks: int
    num_segments: int
    device: Device
    microbatch_group_size: int | None
    distributed_timeout_minutes: float
    backward_share: float | None = None
    auto_share: bool = False
    dp_slice_bytes: int = 0
    auto_slices: bool = False
    delay_weight_grads: tuple[int, ...] = ()
    behind_backwards: tuple[int, ...] = ()
    has_engine_modules: bool = False
    forwards_ahead: int | None = None
    auto_ahead: bool = False
    auto_weight_grads: bool = False
    most_activations: int | None = None
    recompute_early: tuple[int, ...] = ()
    recompute_layers: tuple[int, ...] | None = None
    auto_recompute_layers: bool = False
    recomputes_means: bool = False
    activation_memory_bytes: int | None = None
    overlap_tensor_parallel: bool = False
    overlap_grad_reduce: bool = False
    parameter_share: float = 1.0
    clips_or_scales: bool = False
    trace: Path | None = None
    trace_iterations: range | None = None
    records_tp_sync: bool = False
    microbatch_flops: float = 0.0
    recomputed_flops: float = 0.0
    offload_activations: Offload = "off"
    lazy_inter_segment: bool = False
    offload_everything: bool = False
    cuts_every_segment: bool = False
    slices_dp_sync: bool = False
    reduces_early: bool = False
    receives_late: bool = False
    receives_ahead: int = 1
    steps_shards: bool = False
    gathers_params: bool = False
    shards_params: bool = False
    replicated_segments: tuple[int, ...] = ()
    ties_embeddings: bool = False
    auto_defers: bool = False
    auto_delays: bool = False
    auto_replicates: bool = False
    keeps_forwards: bool = False
    keeps_sums: bool = False
    shards_grads: bool = False
    preemptive_comm: bool = False
    pp_traffic_class: int | None = None
    dp_traffic_class: int | None = None
    saved_bytes: int = 0

    @property
    def name(self) -> str:
        """The order, as ``--schedule`` has it."""
        return self.schedule if self.plan_file is None else f"plan={self.plan_file}"

    @property
    def choice(self) -> Choice:
        """What the flags choose; what they leave to measured times has the defaults."""
        choice = Choice.plain(
            self.name,
            self.num_segments,
            ahead=self.forwards_ahead,
            held=self.most_activations,
            share=None if self.auto_share else self.backward_share,
            slices=self.slices_dp_sync or None,
            pairs=self.overlap_tensor_parallel or None,
        )
        if choice.schedule == "interleaved":
            choice = replace(choice, group=self.microbatch_group_size)
        if self.backward_share is not None:
            choice = choice.changed(step="next")
        if self.auto_weight_grads:
            choice = choice.changed(wgrad="gaps")
        elif self.schedule not in SPLIT_SCHEDULES:
            choice = choice.changed(self.delay_weight_grads, wgrad="last")
            choice = choice.changed(self.behind_backwards, wgrad="behind")
        early = {stage // self.num_ranks for stage in self.recompute_early}
        choice = choice.changed(early, recompute="early")
        return choice.changed(self.replicated_segments, optimizer="replicated")

    @property
    def features(self) -> Features:
        """What plans are made for, beside a choice."""
        return Features(
            steps_shards=self.steps_shards,
            gathers_params=self.gathers_params,
            shards_params=self.shards_params,
            shards_grads=self.shards_grads,
            grad_sync="overlap" if self.overlap_grad_reduce else "serial",
            reduces_early=self.reduces_early,
            receives_late=self.receives_late,
            receives_ahead=self.receives_ahead,
        )

    @property
    def measuring_flag(self) -> str:
        """What leaves something of the choice to measured times; empty if nothing does."""
        table = (
            ("--schedule auto", self.schedule == "auto"),
            ("step=next", self.auto_share),
            ("optimizer=auto", self.auto_replicates),
            ("ahead=auto", self.auto_ahead),
            ("wgrad=gaps", self.auto_weight_grads),
        )
        return next((flag for flag, chooses in table if chooses), "")

    def free(self, num_replicas: int) -> dict[str, tuple[str, ...]]:
        """Return the values of each key of a segment that measured times choose."""
        cuts = self.schedule != "auto" or self.may_cut_sums(num_replicas)
        free = free_values(
            defers=self.auto_defers and cuts,
            delays=self.auto_delays,
            replicates=self.auto_replicates and cuts,
            reduces_early=self.reduces_early,
        )
        return free | ({"wgrad": ("backward", "gaps")} if self.auto_weight_grads else {})

    def may_cut_sums(self, num_replicas: int) -> bool:
        """Return True if ``auto`` may cut gradients into other slices than stock.

        Sums over two replicas are the same in any order; over more, they are equal up to rounding.
        """
        return num_replicas == 2 or (num_replicas > 2 and not self.keeps_sums)

    @classmethod
    def from_args(cls, args: Namespace) -> "Fold3DConfig":
        """Read Megatron's namespace, as parsed or as validated; refuse options that cannot work.

        Validation may add options, from a checkpoint for example. Reading the namespace again
        afterwards checks those too.

        Raises:
            ValueError: one line for each rule that is broken.
        """
        from megatron.fold3d.config.read_config import read_config

        return read_config(args)
