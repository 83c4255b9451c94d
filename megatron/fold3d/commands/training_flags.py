"""The flags of ``pretrain_gpt.py`` for what the planner chose."""

from dataclasses import replace

from megatron.fold3d.analysis.candidates import Candidate
from megatron.fold3d.analysis.model import ModelShape
from megatron.fold3d.analysis.presets import shape_flags


def check_trains(shape: ModelShape) -> None:
    """Return if ``pretrain_gpt.py`` trains such a model.

    Raises:
        ValueError: the model is no GPT.
    """
    if shape.family != "gpt":
        raise ValueError(f"{shape.name} is no GPT, and pretrain_gpt.py trains no other model")


def training_flags(shape: ModelShape, candidate: Candidate, *, one_group: bool = False) -> str:
    """Return the flags for the model, the split and the schedule.

    Args:
        shape: the model.
        candidate: the split and the schedule.
        one_group: run AIAO's order with stock Megatron, as one group of all micro-batches.
    """
    words = [*shape_flags(shape), "--bf16"]
    run = replace(candidate, schedule="interleaved") if one_group else candidate
    words.append(run.flags())
    if one_group:
        groups = "--microbatch-group-size-per-virtual-pipeline-stage"
        words.append(f"{groups} {candidate.num_microbatches}")
    return " ".join(words)
