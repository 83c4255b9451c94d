"""``--segments auto``: measure, choose on the first rank what the simulator says, and agree.

Megatron reads its flag for virtual stages before there is a process group, so the ranks agree
through torchrun's store. Measurements are kept for later runs of the same shape. The choice of the
paper's rule is reported beside it.

Keeps one invariant: the user could have given the chosen flags. The choice has no other effect on
training.
"""

import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from megatron.fold3d.commands.job import setup_of
from megatron.fold3d.commands.megatron_flags import shape_of
from megatron.fold3d.commands.training_flags import layout_of
from megatron.fold3d.config.job_sizes import (
    fitting_segments,
    may_be_uneven,
    num_layers,
    num_microbatches,
    ranks_of_model,
    uneven_ranks,
)
from megatron.fold3d.config.schedule_flags import word_of
from megatron.fold3d.observe.memory_curve import memory
from megatron.fold3d.observe.timeline import Timeline
from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.compile import Job
from megatron.fold3d.plan.schedule_word import AUTO
from megatron.fold3d.policy.num_segments import Segments, by_rule
from megatron.fold3d.policy.partition import Layers
from megatron.fold3d.predict.cost_model.cluster import USABLE_MEMORY
from megatron.fold3d.predict.cost_model.estimate import footprint_of
from megatron.fold3d.predict.cost_model.hardware_profile import HardwareProfile
from megatron.fold3d.predict.search.candidates import MOST_SEGMENTS
from megatron.fold3d.predict.search.segments import by_simulation, with_layers
from megatron.fold3d.runtime.device import device_bytes, device_name
from megatron.fold3d.training.leaving import meeting_point
from megatron.fold3d.training.mistakes import script

PATIENCE_S = 600.0
_PLAIN = (str, int, float, bool)
# The options of Megatron that a layer's time, or a transfer's, depends on.
SHAPE = (
    *("hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "num_query_groups"),
    *("seq_length", "micro_batch_size", "vocab_size", "swiglu", "normalization", "num_experts"),
    *("position_embedding_type", "attention_dropout", "hidden_dropout", "multi_latent_attention"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "use_tp_pp_dp_mapping", "sequence_parallel"),
    *("bf16", "fp16", "fp8"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
    *("transformer_impl", "attention_backend", "distributed_backend", "device"),
)

Room = Callable[[Timeline, Layers, Layers], bool]


def choose(
    args: Namespace,
    measured: HardwareProfile,
    num_microbatches: int,
    fits: Room | None = None,
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
    kept = cache_file(args)
    measured = read_kept(kept)
    store.set("measure", str(int(measured is None)))
    source = f"measured earlier, in {kept}"
    if measured is None:
        measured = HardwareProfile.from_json(measure(argv, defaults))
        source = f"measured now, kept in {kept}"
        keep(kept, measured)
    room = None if builds_own_model else room_for_layers(args)
    choice = choose(args, measured, num_microbatches(args), room)
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


def cache_file(args: Namespace) -> Path:
    """Return the file of a run's shape on its hardware, whether it exists or not.

    It is used only for runs with exactly these. To measure again, delete it.
    """
    of = {name: getattr(args, name) for name in SHAPE} | {
        "nodes": os.environ.get("GROUP_WORLD_SIZE", "1"),  # torchrun counts them so
        "ranks": os.environ["WORLD_SIZE"],
        "accelerator": device_name(torch.device(args.device)),
        "cluster": re.sub(r"\d+", "", platform.node()),  # node017 is as good as node003
        "torch": torch.__version__,
    }
    text = json.dumps(of, sort_keys=True, default=str)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "fold3d" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def read_kept(file: Path) -> HardwareProfile | None:
    """Return what was measured; None if there is no file, or it is of another version."""
    try:
        return HardwareProfile.from_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def keep(file: Path, measured: HardwareProfile) -> None:
    """Keep what was measured."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(f".{os.getpid()}")
    unfinished.write_text(measured.to_json(), encoding="utf-8")
    unfinished.replace(file)


def room_for_layers(args: Namespace) -> Room | None:
    """Return a function that tells whether layers fit into memory, from formulas.

    A layout has room if its fullest rank holds no more than it would with layers as even as
    possible, or no more than is usable of a GPU. A CPU has room for all.

    Returns:
        A function of the simulated iterations, the layers of stages, and those that are as even as
        possible. None for a model whose bytes are not modelled.
    """
    total = device_bytes(torch.device(args.device))
    if total is None:
        return lambda *_: True
    if not args.vocab_size:  # only the tokenizer knows
        return None
    num_ranks: int = args.pipeline_model_parallel_size
    try:
        shape = shape_of(args)
        setup = setup_of(args, max(1, int(os.environ["WORLD_SIZE"]) // ranks_of_model(args)))
        setup.check(shape)
    except ValueError:
        return None
    if args.recompute_layers is not None:
        setup = replace(setup, recompute="full")
    elif args.recompute_activations and args.recompute_granularity is None:
        setup = replace(setup, recompute="selective")

    def has_room(timeline: Timeline, layers: Layers, even: Layers) -> bool:
        peak, of_even = (
            max(rank.device_peak for rank in memory(timeline, footprint))
            for footprint in (footprint_of(shape, setup, num_ranks, its) for its in (layers, even))
        )
        return peak <= max(of_even, USABLE_MEMORY * total)

    return has_room
