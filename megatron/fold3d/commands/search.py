"""``fold3d search``: choose schedule, sizes and segments for a model on a cluster."""

import json
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from megatron.fold3d.commands.console import OK, Progress, write
from megatron.fold3d.commands.cost_sources import add_cluster_options, named_cluster
from megatron.fold3d.commands.job import codes_of
from megatron.fold3d.commands.megatron_flags import Described, add_training_flags, given_training
from megatron.fold3d.commands.search_lines import environment, gains, lines_of, plot, rates_of
from megatron.fold3d.commands.training_flags import (
    check_trains,
    sums_of,
    to_drop,
    training_flags,
)
from megatron.fold3d.commands.yours import Yours, yours
from megatron.fold3d.predict.cost_model.cluster import Cluster
from megatron.fold3d.predict.cost_model.efficiency import source_of
from megatron.fold3d.predict.cost_model.presets import SCRIPTS
from megatron.fold3d.predict.search.candidates import Assumption
from megatron.fold3d.predict.search.planner import search
from megatron.fold3d.predict.search.search_result import JudgedCandidate, Search

EXAMPLE = "fold3d search --model gpt3-18b --cluster a100x64-200g --global-batch-size 256"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of this command."""
    add_cluster_options(parser)
    add_training_flags(
        parser,
        "what is typed for the search, such as --tp and --recompute, is not chosen",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        help="also draw time and memory of all that was tried, as .png, .svg or .pdf",
    )
    parser.add_argument("--top", type=int, default=10, help="rows (default: 10)")
    parser.add_argument(
        "--assume",
        type=_assumptions,
        default=frozenset(),
        metavar="WHAT",
        help="also try what no GPU has timed, separated by commas: "
        f"{', '.join(get_args(Assumption))}",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="the rows as one JSON object")
    form.add_argument(
        "--emit",
        action="store_true",
        help="nothing but the best one's flags of pretrain_gpt.py; "
        "of a script, those to append to its own",
    )


def run(args: Namespace) -> int:
    """Print the choices; returns the exit code."""
    if args.top < 1:
        raise ValueError(f"--top {args.top}: show at least one")
    described = given_training(args)
    shape = described.model()
    cluster = named_cluster(args, shape)
    if (batch := described.args.global_batch_size) is None:
        raise ValueError("--global-batch-size is missing: sequences per iteration; give 256, say")
    if args.emit:
        check_trains(shape)
    if shape.num_experts and "delay-weight-grads" in args.assume:
        raise ValueError(
            "--assume delay-weight-grads: the weight gradients of experts are not split from "
            "their backward; drop it"
        )
    found = search(
        shape,
        cluster,
        global_batch_size=batch,
        top=args.top,
        given=described.given(cluster),
        assumed=args.assume,
        codes=codes_of(described.args, cluster),
        progress=Progress(),
    )
    own, notes = yours(described, cluster) if described.is_job else (None, ())
    if args.plot is not None:
        plot(found, args.plot)
    if args.json:
        write(json.dumps(_as_json(found, own, described, cluster)) + "\n")
    elif args.emit:
        write(f"{_flags(found, described, cluster)}\n")
    else:
        last = [*_last_lines(found, described, cluster)]
        if described.is_job:
            last.append(
                f"next, on a login node: the job with these flags and --check {args.cluster}"
            )
        lines = lines_of(found, shape, cluster, last, own)
        write("\n".join((*described.notes(), *notes, *lines)) + "\n")
    return OK


def _flags(found: Search, user: Described, cluster: Cluster) -> str:
    """Return the flags of the best candidate; for a script, the flags to append to its own.

    Raises:
        ValueError: no training script takes them.
    """
    own: tuple[str, ...] | None = None
    if user.args.model is None:
        own = user.typed_words if user.script else user.words
    candidate = found.choice.candidate
    return training_flags(user.model(), cluster, candidate, fp16=user.args.fp16, own=own)


def _last_lines(found: Search, user: Described, cluster: Cluster) -> Iterator[str]:
    """Yield where flags belong, the environment variables, and the flags."""
    yield f", appended to those of {user.script}:" if user.script else ":"
    try:
        flags = _flags(found, user, cluster)
    except ValueError as error:
        yield f"({error})"
        return
    for name, value in environment(found.choice.candidate, cluster).items():
        yield f"export {name}={value}"
    yield flags
    if user.script and (dropped := " ".join(to_drop(user.own_words, flags))):
        yield f"and without {dropped}"


def _assumptions(text: str) -> frozenset[str]:
    found = frozenset(text.split(","))
    known = get_args(Assumption)
    if unknown := sorted(found - set(known)):
        raise ArgumentTypeError(f"found {unknown[0]!r}; it is one of {', '.join(known)}")
    return found


def _as_json(found: Search, own: Yours | None, user: Described, cluster: Cluster) -> dict[str, Any]:
    shape = user.model()

    def row(choice: JudgedCandidate) -> dict[str, Any]:
        c, setup = choice.candidate, choice.candidate.setup
        return {
            "schedule": c.schedule,
            "offload": c.offload,
            "shard_segments": c.shards,
            "preemptive_comm": c.preemptive,
            "stock": c.is_stock,
            "dp": setup.data_parallel,
            "pp": c.num_ranks,
            "tp": setup.tensor_parallel,
            "cp": setup.context_parallel,
            "ep": setup.expert_parallel,
            "segments": c.num_segments,
            "order": setup.order,
            "microbatches": c.num_microbatches,
            "micro_batch_size": setup.microbatch_size,
            "choice": str(c.choice),
            "distributed_optimizer": setup.distributed_optimizer,
            "gradient_bytes": setup.gradient_bytes,
            "gathered_bits": setup.gathered_bits or 8 * setup.element_bytes,
            "summed_bits": setup.summed_bits or 8 * setup.gradient_bytes,
            "sums_in_fp32": list(sums_of(setup)),
            "layers": c.layers or None,
            "recompute": setup.asked_recompute,
            "recompute_layers": c.recompute_layers or None,
            "iteration_s": choice.iteration_s,
            **rates_of(choice, shape, cluster),
            "device_bytes": choice.device_bytes,
            "host_bytes": choice.host_bytes,
            "exposure": choice.exposed._asdict(),
            "limited_by": choice.limit,
        }

    return {
        "rows": [row(choice) for choice in sorted(found.best, key=lambda c: c.iteration_s)],
        "in_16_bits": list(map(row, found.in_16_bits)),
        "coded": list(map(row, found.coded)),
        "best_stock": found.best_stock and row(found.best_stock),
        "same_layout": found.same_layout and row(found.same_layout),
        "best": row(found.choice),
        "yours": own and row(own.run),
        "stock_flags": own and {one.flags: row(one.run) for one in own.alone},
        "yours_coded": own and own.coded and row(own.coded),
        "same_layout_as_yours": own and own.same_layout and row(own.same_layout),
        "gain": found.gain,
        "gains": {case.assumption: case.gain for case in gains(found, shape, cluster)},
        "efficiency": source_of(cluster),
        "environment": environment(found.choice.candidate, cluster),
        "many_queues_s": found.many_queues_s,
        "flags": _flags(found, user, cluster) if shape.family in SCRIPTS else None,
        "considered": found.considered,
        "too_large": found.too_large,
        "notes": user.notes(),
    }
