"""``--segments auto``: what it needs, and the choice itself.

Keeps one invariant: the choice is a number that the user could have given. What chooses it is
gone when training begins.
"""

from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.fold3d.analysis.measured import Measured
from megatron.fold3d.analysis.segments import Segments, by_rule, by_simulation
from megatron.fold3d.layer_split import fitting_segments, num_layers, uneven_ranks
from megatron.fold3d.plan.schedules import ONE_SEGMENT_SCHEDULES
from megatron.fold3d.refusals import named

AUTO = "auto"


def segments_or_auto(text: str) -> int | str:
    """Read the value of ``--segments``."""
    try:
        return text if text == AUTO else int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is neither a number nor {AUTO}") from None


def auto_problems(args: Namespace, schedule: str, virtual_stages: str | None) -> Iterator[str]:
    """Yield found, rule and fix of all that is in the way of ``--segments auto``.

    Args:
        args: Megatron's namespace, as parsed.
        schedule: that will run.
        virtual_stages: the flag of Megatron's that gives them, if one does.
    """
    if schedule in ("stock", "plan-file", *ONE_SEGMENT_SCHEDULES):
        yield (
            f"--segments auto with {named(schedule)}: it is chosen for schedules of several "
            "segments; give --segments N, or --schedule aiao"
        )
    if virtual_stages is not None:
        yield f"--segments auto with {virtual_stages}: that is a number; drop one of the two"
    elif not num_layers(args):
        yield (
            "--segments auto without --num-layers: the checkpoint would tell too late; "
            "give --num-layers"
        )
    elif not fitting_segments(args):
        yield uneven_ranks(args)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The number of segments, and what the paper's rule and the simulator say."""

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


def choose(args: Namespace, measured: Measured, num_microbatches: int) -> Choice:
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
    return Choice(
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
            schedule=args.schedule,
            deferred=args.backward_share is not None,
            preemptive=False,
        ),
    )
