"""``fold3d search``: choose schedule, sizes and segments for a model on a cluster."""

import json
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, get_args

from megatron.fold3d.commands.console import OK, Progress, write
from megatron.fold3d.commands.hardware_options import add_hardware_options, named_hardware
from megatron.fold3d.commands.megatron_flags import (
    Described,
    add_training_flags,
    given_training,
)
from megatron.fold3d.commands.training_flags import (
    check_trains,
    sums_of,
    to_drop,
    training_flags,
    undecided,
)
from megatron.fold3d.observe.breakdown import Flops
from megatron.fold3d.predict.cost_model.cluster import Cluster
from megatron.fold3d.predict.cost_model.model_shape import ModelShape
from megatron.fold3d.predict.cost_model.presets import SCRIPTS
from megatron.fold3d.predict.cost_model.sizes import Recompute
from megatron.fold3d.predict.cost_model.training_flops import training_flops
from megatron.fold3d.predict.search.candidates import Assumption, Given
from megatron.fold3d.predict.search.planner import search
from megatron.fold3d.predict.search.search_result import JudgedCandidate
from megatron.fold3d.predict.search.search_result import Search as Found
from megatron.fold3d.predict.search.sensitivity import gains_if_off_by_half

EXAMPLE = "fold3d search --model gpt3-18b --cluster a100x64-200g --global-batch-size 256"


@dataclass(frozen=True, slots=True)
class _Answer:
    """The search's findings, and the one to take; ``fp16`` if the user's flags ask for it."""

    found: Found
    described: Described | None

    def flags(self, shape: ModelShape, cluster: Cluster) -> str:
        """Return the best one's flags, of a script those to append to its own.

        Raises:
            ValueError: there is no training script that takes them.
        """
        candidate, user = self.found.choice.candidate, self.described
        if user is None:
            return training_flags(shape, cluster, candidate)
        own = () if user.script else tuple(undecided(user.words))
        return training_flags(shape, cluster, candidate, fp16=user.fp16, own=own)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of this command."""
    add_hardware_options(parser, required=True, model_required=False)
    add_training_flags(parser, "read model, batch and precision from them, instead of --model")
    parser.add_argument(
        "--global-batch-size", type=int, metavar="N", help="sequences per iteration"
    )
    parser.add_argument("--top", type=int, default=10, metavar="N", help="rows (default: 10)")
    parser.add_argument(
        "--assume",
        type=_assumptions,
        default=frozenset(),
        metavar="WHAT",
        help="also try what no GPU has timed, separated by commas: "
        f"{', '.join(get_args(Assumption))}",
    )
    given = parser.add_argument_group("what is not to be chosen")
    for flag, what in (
        ("--tp", "tensor-parallel size"),
        ("--pp", "pipeline ranks"),
        ("--dp", "data-parallel size"),
        ("--segments", "model chunks per rank"),
        ("--micro-batch-size", "sequences"),
    ):
        given.add_argument(flag, type=int, metavar="N", help=what)
    given.add_argument("--recompute", choices=get_args(Recompute))
    given.add_argument("--fp32", action="store_true", help="train in 32 bits instead of 16")
    given.add_argument(
        "--grad-reduce-in-bf16", action="store_true", help="sum gradients in 16 bits instead of 32"
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
    described = _described(args)
    shape, cluster = named_hardware(args, described.shape if described else None)
    batch = args.global_batch_size or (described.global_batch_size if described else 0)
    if args.emit:
        check_trains(shape)
    if shape.num_experts and "delay-weight-grads" in args.assume:
        raise ValueError(
            "--assume delay-weight-grads: the weight gradients of experts are not split from "
            "their backward; drop it"
        )
    with Progress("simulated", "no other can be faster") as progress:
        found = search(
            shape,
            cluster,
            global_batch_size=batch,
            top=args.top,
            given=Given(
                tensor_parallel=args.tp,
                data_parallel=args.dp,
                num_ranks=args.pp,
                num_segments=args.segments,
                microbatch_size=args.micro_batch_size,
                recompute=args.recompute,
                fp32=args.fp32 or (described is not None and described.fp32),
                context_parallel=described.context_parallel if described else 1,
                expert_parallel=described.expert_parallel if described else 1,
                expert_tensor_parallel=described.expert_tensor_parallel if described else 0,
                small_gradients=args.grad_reduce_in_bf16
                or (described is not None and described.small_gradients),
                accumulates_in_fp32=described is not None and described.accumulates_in_fp32,
                scatters_in_fp32=described is not None and described.scatters_in_fp32,
            ),
            assumed=args.assume,
            progress=progress,
        )
    answer = _Answer(found, described)
    notes = described.notes if described else ()
    if args.json:
        rows = _as_json(answer, shape, cluster)
        write(json.dumps(rows | {"notes": notes}) + "\n")
    elif not args.emit:
        write("\n".join((*notes, *_lines(answer, shape, cluster))) + "\n")
    else:
        write(f"{answer.flags(shape, cluster)}\n")
    return OK


def _described(args: Namespace) -> Described | None:
    """Read the user's own flags, if they are what describes the model.

    Raises:
        ValueError: the model is described twice or not at all.
    """
    given = {
        "--model": args.model is not None,
        "flags behind --": bool(args.flags),
        "--from-script": args.from_script is not None,
    }
    if sum(given.values()) != 1:
        found = " with ".join(name for name, is_given in given.items() if is_given) or "no model"
        raise ValueError(f"{found}: give one of {', '.join(given)}")
    if args.flags or args.from_script is not None:
        return given_training(args)
    if args.global_batch_size is None:
        raise ValueError("--global-batch-size is missing: sequences per iteration; give 256, say")
    return None


def _assumptions(text: str) -> frozenset[str]:
    found = frozenset(text.split(","))
    known = get_args(Assumption)
    if unknown := sorted(found - set(known)):
        raise ArgumentTypeError(f"found {unknown[0]!r}; it is one of {', '.join(known)}")
    return found


def _lines(answer: _Answer, shape: ModelShape, cluster: Cluster) -> Iterator[str]:
    found, stock = answer.found, answer.found.best_stock
    rows = [*found.best, *([stock] if stock and stock not in found.best else ())]
    width = max([19, *(len(row.candidate.name) for row in rows)])
    yield (
        f"{'schedule':<{width}} {'dp':>4} {'pp':>3} {'tp':>3} {'seg':>3} {'mbs':>3} {'group':>5} "
        f"{'share':>5} {'optimizer':<11} {'recompute':<9} {'iteration':>9} {'memory':>9} "
        f"{'bubble':>6} {'DP.sync':>7} {'PP.sync':>7}  limited by"
    )
    yield from dict.fromkeys(_line(row, width) for row in found.best)
    if stock and stock not in found.best:
        yield "best of stock Megatron:"
        yield _line(stock, width)
    yield f"{found.considered} considered, {found.too_large} too large for memory"
    if any(choice.candidate.offload for choice in found.best):
        yield "+offload: no GPU has timed it; rows have it where no recomputation makes AIAO fit"
    if found.undelayed is not None:
        gain = found.undelayed.iteration_s / found.best[0].iteration_s - 1
        yield (
            f"{found.best[0].candidate.name}: delaying weight gradients gains {gain:.1%}; "
            "no GPU has timed it"
        )
    yield from _in_16_bits(found)
    yield from _bought(found)
    yield from _assumptions_of(answer, shape, cluster)
    yield f"per GPU: {_flops(found.choice, shape, cluster)}"
    if found.many_queues_s is not None:
        least_s, most_s = found.many_queues_s
        yield (
            f"with CUDA_DEVICE_MAX_CONNECTIONS=32: {least_s:.3f}s, or up to {most_s:.3f}s as it "
            f"may expose TP.sync that one queue hides; with 1: {found.choice.iteration_s:.3f}s"
        )
    user = answer.described if answer.described and answer.described.script else None
    where = f", appended to those of {user.script}:" if user else ":"
    if found.choice.candidate.is_stock:
        yield f"AIAO gains nothing here, use these stock flags{where}"
    elif stock is None:
        yield f"no stock configuration fits; use these flags{where}"
    else:
        yield f"{found.gain:.1%} faster than the best of stock Megatron, with these flags{where}"
    try:
        flags = answer.flags(shape, cluster)
    except ValueError as error:
        yield f"({error})"
        return
    yield flags
    if user and (dropped := " ".join(to_drop(user.words, flags))):
        yield f"and without {dropped}"


def _flops(choice: JudgedCandidate, shape: ModelShape, cluster: Cluster) -> Flops:
    """Return the FLOP/s of a GPU."""
    c, setup = choice.candidate, choice.candidate.setup
    split = c.layers or c.num_ranks * c.num_segments
    each = training_flops(shape, setup.recompute, split, c.recompute_layers)
    batch = setup.microbatch_size * setup.data_parallel * c.num_microbatches
    return each.times(batch / choice.iteration_s / cluster.num_gpus)


def _bought(found: Found) -> Iterator[str]:
    """Say what the memory of shards is spent on."""
    best = found.best[0]
    if best.candidate.shards == "off":
        return
    flag = f"--shard-segments {best.candidate.shards}"
    if found.unsharded is None:
        yield f"{flag}: no other plan of ours fits into memory"
        return
    gain = found.unsharded.iteration_s / best.iteration_s - 1
    changes = [
        f"{name} {after} in place of {before}"
        for (name, before), (_, after) in zip(
            _sizes_of(found.unsharded), _sizes_of(best), strict=True
        )
        if before != after
    ]
    bought = ", ".join(changes) or "room for its activations"
    yield f"{flag} gains {gain:.1%} over the best that keeps all whole; it buys {bought}"


def _in_16_bits(found: Found) -> Iterator[str]:
    """Say what gradients of 16 bits gain on both sides, and what they change."""
    if not found.in_16_bits:
        return
    yield "with gradients that travel in 16 bits, at sizes from above:"
    for choice in found.in_16_bits:
        setup = choice.candidate.setup
        before = found.best_stock if choice.candidate.is_stock else found.ours
        less = 0.0 if before is None else 1 - choice.iteration_s / before.iteration_s
        flags = " ".join(["--grad-reduce-in-bf16", *sums_of(setup)])
        optimizer = "--use-distributed-optimizer" if setup.distributed_optimizer else "all-reduce"
        name = f"{choice.candidate.name}, {optimizer}"
        yield f"  {choice.iteration_s:.3f}s ({less:.1%} less), {name}:"
        yield f"    {flags}"
    setups = [choice.candidate.setup for choice in found.in_16_bits]
    if all(setup.accumulates_in_fp32 for setup in setups):
        changes = "micro-batches still add up in 32 bits, but each replica's sum is rounded to 16"
    else:
        changes = "each micro-batch adds to a sum of 16 bits, which loses small gradients"
    yield f"  {changes}: losses will differ, so compare them before you use it"


def _sizes_of(choice: JudgedCandidate) -> tuple[tuple[str, object], ...]:
    c, setup = choice.candidate, choice.candidate.setup
    return (
        ("--micro-batch-size", setup.microbatch_size),
        ("--recompute", setup.recompute),
        ("--tp", setup.tensor_parallel),
        ("--pp", c.num_ranks),
        ("--segments", c.num_segments),
        ("the schedule", c.name.removesuffix(f"+{c.shards}")),
    )


def _assumptions_of(answer: _Answer, shape: ModelShape, cluster: Cluster) -> Iterator[str]:
    """Say what the gain rests on."""
    found = answer.found
    ours, stock = found.ours, found.best_stock
    if ours is None or stock is None:
        return
    yield "the best of ours is faster than the best of stock by"
    yield f"  {found.gain:>6.1%}  as assumed: stock waits for its sends, and efficiencies as below"
    for assumption, gain in gains_if_off_by_half(shape, cluster, ours.candidate, stock.candidate):
        yield f"  {gain:>6.1%}  if {assumption}"


def _line(choice: JudgedCandidate, width: int) -> str:
    candidate, spent = choice.candidate, choice.exposed
    setup, share = candidate.setup, candidate.backward_share
    shares = (spent.share(s) for s in (spent.bubble_s, spent.grad_sync_s, spent.p2p_s))
    recompute = "by stage" if candidate.recompute_layers else setup.recompute
    time_s = choice.iteration_s
    time = f"{time_s:.3f}s" if time_s >= 0.1 else f"{1e3 * time_s:.3f}ms"
    return (
        f"{candidate.name:<{width}} {setup.data_parallel:>4} {candidate.num_ranks:>3} "
        f"{setup.tensor_parallel:>3} {candidate.num_segments:>3} {setup.microbatch_size:>3} "
        f"{candidate.group_size or '-':>5} {'-' if share is None else share:>5} "
        f"{'distributed' if setup.distributed_optimizer else 'whole':<11} "
        f"{recompute:<9} {time:>9} {choice.device_bytes / 2**30:>5.1f} GiB "
        "{:>6.1%} {:>7.1%} {:>7.1%}".format(*shares)
        + f"  {choice.limit}"
    )


def _as_json(answer: _Answer, shape: ModelShape, cluster: Cluster) -> dict[str, Any]:
    def row(choice: JudgedCandidate) -> dict[str, Any]:
        c, setup = choice.candidate, choice.candidate.setup
        flops = _flops(choice, shape, cluster)
        return {
            "schedule": c.schedule,
            "offload": c.offload,
            "shard_segments": c.shards,
            "preemptive_comm": c.preemptive,
            "stock": c.is_stock,
            "dp": setup.data_parallel,
            "pp": c.num_ranks,
            "tp": setup.tensor_parallel,
            "segments": c.num_segments,
            "order": setup.order,
            "microbatches": c.num_microbatches,
            "micro_batch_size": setup.microbatch_size,
            "group_size": c.group_size,
            "backward_share": c.backward_share,
            "replicate_optimizer": c.replicated,
            "delayed_weight_grads": c.delayed_weight_grads,
            "places_weight_grads": c.places_weight_grads,
            "forwards_ahead": c.forwards_ahead,
            "distributed_optimizer": setup.distributed_optimizer,
            "layers": c.layers or None,
            "recompute": setup.recompute,
            "recompute_layers": c.recompute_layers or None,
            "recompute_early": c.recompute_early,
            "overlap_tensor_parallel": c.overlap_tensor_parallel,
            "iteration_s": choice.iteration_s,
            "flops_per_gpu_s": flops.model,
            "hardware_flops_per_gpu_s": flops.hardware,
            "device_bytes": choice.device_bytes,
            "host_bytes": choice.host_bytes,
            "exposure": asdict(choice.exposed),
            "limited_by": choice.limit,
        }

    found = answer.found
    return {
        "rows": list(map(row, found.best)),
        "best_stock": found.best_stock and row(found.best_stock),
        "best": row(answer.found.choice),
        "gain": answer.found.gain,
        "many_queues_s": found.many_queues_s,
        "flags": answer.flags(shape, cluster) if shape.family in SCRIPTS else None,
        "considered": found.considered,
        "too_large": found.too_large,
    }
