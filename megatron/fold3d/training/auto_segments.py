"""The choice of ``--segments auto``: the simulator's, reported beside that of the paper's rule.

Keeps one invariant: the user could have given the chosen flags. The choice has no other effect on
training.
"""

import shlex
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

from megatron.fold3d.commands.training_flags import layout_of
from megatron.fold3d.config.layer_split import (
    fitting_segments,
    may_be_uneven,
    num_layers,
    uneven_ranks,
)
from megatron.fold3d.config.schedule_flags import word_of
from megatron.fold3d.observe.timeline import Timeline
from megatron.fold3d.plan.schedule_word import AUTO
from megatron.fold3d.policy.num_segments import Segments, by_rule
from megatron.fold3d.policy.partition import Layers
from megatron.fold3d.predict.cost_model.hardware_profile import HardwareProfile
from megatron.fold3d.predict.search.candidates import MOST_SEGMENTS
from megatron.fold3d.predict.search.segments import SimulatedRun, by_simulation, with_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentChoice:
    """The chosen number of segments: what the paper's rule and the simulator say.

    Attributes:
        rule: the paper's, if it has one: it knows equally many layers only.
        simulation: the simulator's.
    """

    rule: Segments | None
    simulation: Segments

    @property
    def num_segments(self) -> int:
        """The simulator's: it knows the schedule, and what else is on the links."""
        return self.simulation.num_segments

    @property
    def layers(self) -> Layers:
        """The number of layers of each stage, where the numbers differ."""
        return self.simulation.layers

    @property
    def flags(self) -> list[str]:
        """The flags that a user would give for this choice."""
        flags = ["--segments", str(self.num_segments)]
        if self.layers:
            flags += ["--pipeline-model-parallel-layout", layout_of(self.layers)]
        return flags

    def __str__(self) -> str:
        chosen = f"{shlex.join(self.flags)}; {self.simulation.reason}"
        if self.rule is None:
            return chosen
        return f"{chosen}; the paper's rule says {self.rule.num_segments}: {self.rule.reason}"


def choose(
    args: Namespace,
    measured: HardwareProfile,
    num_microbatches: int,
    fits: Callable[[Timeline, Layers, Layers], bool] | None = None,
) -> SegmentChoice:
    """Return the number of segments, and the layers of stages, expected to train fastest.

    Args:
        args: Megatron's namespace, as parsed.
        measured: the times that were measured on the run's hardware.
        num_microbatches: per iteration.
        fits: whether memory has room for layers that are not even, as in `with_layers`; if it is
            not known, they are even.

    Raises:
        ValueError: they cannot be even, and whether other layers fit is not known.
    """
    options, layers = fitting_segments(args), num_layers(args)
    word, num_ranks = word_of(args), int(args.pipeline_model_parallel_size)
    rank_layers = layers / num_ranks
    layer_s = measured.layer_forward_s + measured.layer_backward_s
    pipeline = SimulatedRun(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        schedule="aiao" if word.order == AUTO else word.order,
        deferred=word.value("step") == "next",
    )
    if fits is None or not may_be_uneven(args):
        if not options:
            raise ValueError(f"--segments auto: {uneven_ranks(args)}")
        found = by_simulation(
            options,
            lambda n: measured.costs((layers / (num_ranks * n),) * (num_ranks * n)),
            pipeline,
        )
    else:
        others = range(1, min(MOST_SEGMENTS, layers // num_ranks) + 1)
        found = with_layers({*options, *others}, layers, measured.costs, pipeline, fits)
    rule = None
    if options:
        rule = by_rule(
            options,
            compute_s=num_microbatches * rank_layers * layer_s,
            message_s=measured.message_s,
            grad_sync_s=measured.grad_sync_s(rank_layers * measured.layer_gradient_bytes),
            num_microbatches=num_microbatches,
        )
    return SegmentChoice(rule=rule, simulation=found)
