"""The sizes of a plan, as commands report them."""

from typing import Any

from megatron.fold3d.commands.console import counted
from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.plan.memory import peak_activations


def sizes(plan: Plan) -> dict[str, Any]:
    """Return what the JSON of every command says about its plan."""
    return {
        "ranks": plan.num_ranks,
        "segments": plan.num_segments,
        "microbatches": plan.num_microbatches,
        "actions": sum(map(len, plan.programs)),
        "peak_activations": peak_activations(plan),
    }


def in_words(num_ranks: int, num_segments: int, num_microbatches: int) -> str:
    """Return the sizes of a plan as a heading."""
    sizes = {"ranks": num_ranks, "segments": num_segments, "micro-batches": num_microbatches}
    return ", ".join(counted(number, things) for things, number in sizes.items())
