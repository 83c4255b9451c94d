"""``--segments auto``: measure, choose on the first rank what the simulator says, and agree.

Megatron reads its flag for virtual stages before there is a process group, so the ranks agree
through torchrun's store. Measurements are kept for later runs of the same shape. The choice of the
paper's rule is reported beside it.

Keeps one invariant: the user could have given the chosen flags. The choice has no other effect on
training.
"""

import json
import os
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megatron.fold3d.commands.training_flags import layout_of
from megatron.fold3d.config import job_sizes
from megatron.fold3d.config.layer_split import (
    fitting_segments,
    may_be_uneven,
    num_layers,
    uneven_ranks,
)
from megatron.fold3d.config.schedule_flags import word_of
from megatron.fold3d.observe.timeline import Timeline
from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.compile import Job
from megatron.fold3d.plan.schedule_word import AUTO
from megatron.fold3d.policy.num_segments import Segments, by_rule
from megatron.fold3d.policy.partition import Layers
from megatron.fold3d.predict.cost_model.hardware_profile import HardwareProfile
from megatron.fold3d.predict.search.candidates import MOST_SEGMENTS
from megatron.fold3d.predict.search.segments import by_simulation, with_layers
from megatron.fold3d.training import measurement_cache
from megatron.fold3d.training.layer_memory import room_for_layers
from megatron.fold3d.training.leaving import meeting_point
from megatron.fold3d.training.mistakes import script

PATIENCE_S = 600.0
_PLAIN = (str, int, float, bool)


def choose(
    args: Namespace,
    measured: HardwareProfile,
    num_microbatches: int,
    fits: Callable[[Timeline, Layers, Layers], bool] | None = None,
) -> Segments:
    """Return the number of segments, and the layers of stages, expected to train fastest.

    It is the simulator's choice: it knows the schedule, and what else is on the links. The reason
    tells the paper's too, if its rule has one: it knows equally many layers only.

    Args:
        fits: whether memory has room for layers that are not even, as in `with_layers`; if it is
            not known, they are even.

    Raises:
        ValueError: they cannot be even, and whether other layers fit is not known.
    """
    options, layers = fitting_segments(args), num_layers(args)
    word, num_ranks = word_of(args), int(args.pipeline_model_parallel_size)
    rank_layers = layers / num_ranks
    layer_s = measured.layer_forward_s + measured.layer_backward_s
    plain = Choice.plain("aiao" if word.order == AUTO else word.order, 1, share=1.0)
    job = Job(
        choice=plain.changed(step="next") if word.value("step") == "next" else plain,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
    )
    if fits is None or not may_be_uneven(args):
        if not options:
            raise ValueError(f"--segments auto: {uneven_ranks(args)}")
        found = by_simulation(
            options,
            lambda n: measured.costs((layers / (num_ranks * n),) * (num_ranks * n)),
            job,
        )
    else:
        others = range(1, min(MOST_SEGMENTS, layers // num_ranks) + 1)
        found = with_layers({*options, *others}, layers, measured.costs, job, fits)
    if not options:
        return found
    rule = by_rule(
        options,
        compute_s=num_microbatches * rank_layers * layer_s,
        message_s=measured.message_s,
        grad_sync_s=measured.grad_sync_s(rank_layers * measured.layer_gradient_bytes),
        num_microbatches=num_microbatches,
    )
    more = f"; the paper's rule says {rule.num_segments}: {rule.reason}"
    return replace(found, reason=found.reason + more)


def flags_of(chosen: Segments) -> list[str]:
    """Return the flags that a user would give for a choice."""
    layout = ["--pipeline-model-parallel-layout", layout_of(chosen.layers)] if chosen.layers else ()
    return ["--segments", str(chosen.num_segments), *layout]


def choose_segments(
    args: Namespace, argv: Sequence[str], defaults: Mapping[str, Any], *, builds_own_model: bool
) -> list[str]:
    """Return the flags of the choice, the same on every rank; the first rank says the reason.

    Args:
        argv: the flags it was parsed from; a script's own may be among them.
        defaults: values of flags that are not given, by their attributes' names.
        builds_own_model: as of `launch.prepare`; all stages then get equally many layers.

    Raises:
        ValueError: torchrun did not start the run, or the model cannot be measured.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise ValueError(
            "--segments auto without torchrun: ranks agree on it in torchrun's store; "
            "start with torchrun, or give --segments N"
        )
    store = meeting_point("segments")
    if os.environ["RANK"] != "0":
        if store.get("measure") == b"1":
            measure(argv, defaults)
        agreed: list[str] = store.get("segments").decode().split()
        return agreed
    kept = measurement_cache.cache_file(args)
    measured = measurement_cache.read(kept)
    store.set("measure", str(int(measured is None)))
    source = f"measured earlier, in {kept}"
    if measured is None:
        measured = HardwareProfile.from_json(measure(argv, defaults))
        source = f"measured now, kept in {kept}"
        measurement_cache.write(kept, measured)
    room = None if builds_own_model else room_for_layers(args)
    choice = choose(args, measured, job_sizes.num_microbatches(args), room)
    # For `fold3d simulate --costs`.
    stages = int(args.pipeline_model_parallel_size) * choice.num_segments
    costs = measured.costs(choice.layers or (num_layers(args) / stages,) * stages)
    name = f"{kept.stem}-costs-of-{choice.num_segments}-segments.json"
    kept.with_name(name).write_text(costs.to_json(), encoding="utf-8")
    flags = flags_of(choice)
    store.set("segments", " ".join(flags))
    said = [f"{shlex.join(flags)}; {choice.reason}; {source}"]
    if builds_own_model:
        said.append(
            "measured is a layer of the GPT that Megatron's flags describe; if this script's "
            "layers take other times, try other --segments N too"
        )
    sys.stderr.writelines(f"{script()}: --segments auto: {line}\n" for line in said)
    return flags


def measure(argv: Sequence[str], defaults: Mapping[str, Any]) -> str:
    """Run this rank's measuring process; returns, on the first rank, what it has measured.

    Args:
        argv: flags of Megatron and of ours; others are ignored.
        defaults: values of flags that are not given; only those that JSON can represent.

    Raises:
        ValueError: it failed.
    """
    with TemporaryDirectory(prefix="fold3d-") as folder:
        found = Path(folder) / "measured.json"
        module = "megatron.fold3d.training.measure_worker"
        plain = {name: value for name, value in defaults.items() if isinstance(value, _PLAIN)}
        before = [sys.executable, "-m", module, str(os.getpid()), str(found), json.dumps(plain)]
        command = [*before, *argv, "--segments", "1"]
        try:
            job = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ValueError(
                f"--segments auto: nothing is measured after {PATIENCE_S:.0f} s; give --segments N"
            ) from None
        if job.returncode != 0:
            *_, last = job.stderr.strip().splitlines() or ["no message"]
            raise ValueError(f"--segments auto: this cannot be measured: {last}; give --segments N")
        return found.read_text(encoding="utf-8") if found.is_file() else ""
