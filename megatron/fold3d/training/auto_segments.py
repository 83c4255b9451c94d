"""The choice of ``--segments auto``: the simulator's, reported beside that of the paper's rule.

Keeps one invariant: the choice is a number that the user could have given. Nothing of the chooser
is left when training begins.
"""

from argparse import Namespace
from dataclasses import dataclass

from megatron.fold3d.config.layer_split import fitting_segments, num_layers
from megatron.fold3d.policy.num_segments import Segments, by_rule
from megatron.fold3d.predict.cost_model.hardware_profile import HardwareProfile
from megatron.fold3d.predict.search.segments import by_simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentChoice:
    """The chosen number of segments: what the paper's rule and the simulator say."""

    rule: Segments
    simulation: Segments

    @property
    def num_segments(self) -> int:
        """The simulator's: it knows the schedule, and what else is on the links."""
        return self.simulation.num_segments

    def __str__(self) -> str:
        return (
            f"--segments {self.num_segments}; {self.simulation.reason}; the paper's rule says "
            f"{self.rule.num_segments}: {self.rule.reason}"
        )


def choose(args: Namespace, measured: HardwareProfile, num_microbatches: int) -> SegmentChoice:
    """Return the number of segments that is expected to train fastest.

    Args:
        args: Megatron's namespace, as parsed.
        measured: on the run's hardware.
        num_microbatches: per iteration.
    """
    options, layers = fitting_segments(args), num_layers(args)
    num_ranks: int = args.pipeline_model_parallel_size
    rank_layers = layers / num_ranks
    layer_s = measured.layer_forward_s + measured.layer_backward_s
    return SegmentChoice(
        rule=by_rule(
            options,
            compute_s=num_microbatches * rank_layers * layer_s,
            message_s=measured.message_s,
            grad_sync_s=measured.grad_sync_s(rank_layers * measured.layer_gradient_bytes),
            num_microbatches=num_microbatches,
        ),
        simulation=by_simulation(
            options,
            lambda segments: measured.costs(layers, num_ranks, segments),
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            schedule="aiao" if args.schedule == "auto" else args.schedule,
            deferred=args.backward_share is not None,
            preemptive=False,
        ),
    )
