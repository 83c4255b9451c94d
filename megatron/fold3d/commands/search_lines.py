"""What ``fold3d search`` prints: rows, what the gain rests on, the verdict, flags."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path

from megatron.fold3d.commands.pictures import figure
from megatron.fold3d.commands.training_flags import LOCAL_FP32, sums_of
from megatron.fold3d.predict.cost_model.cluster import Cluster
from megatron.fold3d.predict.cost_model.efficiency import source_of
from megatron.fold3d.predict.cost_model.model_shape import ModelShape
from megatron.fold3d.predict.search.candidate_estimate import flops_of
from megatron.fold3d.predict.search.candidates import Candidate
from megatron.fold3d.predict.search.search_result import JudgedCandidate, Search
from megatron.fold3d.predict.search.sensitivity import Case, gains_if_off_by_half

WIDTH = 80
_ROW = "{:>9} {:>5} {:>4} {:>3} {:>2} {:>3} {:>3} {:<5} {:<5} {:<11} {}"
_SAME = 0.002  # of an iteration: times that differ by less are shown as one
_SHORT = {"none": "none", "selective": "sel", "full": "full"}


def lines_of(
    found: Search, shape: ModelShape, cluster: Cluster, flags: Sequence[str]
) -> Iterator[str]:
    """Yield the answer in words.

    Args:
        found: what the search has found.
        shape: the model.
        cluster: the cluster that was searched for.
        flags: the lines that end the answer; the first one follows the verdict.
    """
    yield from _table(found)
    yield f"{found.considered} considered, {found.too_large} too large for memory"
    yield f"efficiency of layers: {source_of(cluster)}"
    if any(choice.candidate.offload for choice in found.best):
        flag = "--offload-activations on"
        yield f"{flag}: no GPU has timed it; rows have it where no recomputation makes AIAO fit"
    yield from _in_16_bits(found)
    cases = gains(found, shape, cluster)
    yield from _assumptions(found, cases)
    yield from _where_experts_sit(found.choice.candidate, cluster)
    rates = rates_of(found.choice, shape, cluster)
    yield (
        f"per GPU: {rates['flops_per_gpu_s'] / 1e12:.1f} TFLOP/s of the model, "
        f"{rates['hardware_flops_per_gpu_s'] / 1e12:.1f} computed"
    )
    yield f"MFU {rates['mfu']:.1%}; {rates['tokens_per_s']:,.0f} tokens/s of all GPUs"
    if found.many_queues_s is not None:
        least_s, most_s = found.many_queues_s
        yield (
            f"with CUDA_DEVICE_MAX_CONNECTIONS=32: {least_s:.3f}s, or up to {most_s:.3f}s as it "
            f"may expose TP.sync that one queue hides; with 1: {found.choice.iteration_s:.3f}s"
        )
    first, *others = flags
    yield f"{verdict(found, cases)}{first}"
    yield from others


def _where_experts_sit(candidate: Candidate, cluster: Cluster) -> Iterator[str]:
    ranks = candidate.setup.expert_ranks
    if ranks[1] > 1:
        inside = prod(ranks) <= cluster.gpus_per_node
        where = (
            "inside a node" if inside else f"across {prod(ranks) // cluster.gpus_per_node} nodes"
        )
        yield f"experts of a layer: on {prod(ranks)} GPUs, {where}"


def verdict(found: Search, cases: Sequence[Case]) -> str:
    """Return what to do: a gain that an assumption may turn into a loss is to be measured first."""
    if found.choice.candidate.is_stock:
        return "AIAO gains nothing here, use these stock flags"
    if not cases:
        return "no stock configuration fits; use these flags"
    worst, most = min(cases, key=lambda case: case.gain), max(case.gain for case in cases)
    if worst.gain > 0:
        return f"{worst.gain:.1%} to {most:.1%} faster than stock Megatron, with these flags"
    return (
        f"measure first: {-worst.gain:.1%} slower to {most:.1%} faster than stock Megatron; what "
        f"decides is {worst.decides}: {worst.measure}; ours has these flags"
    )


def gains(found: Search, shape: ModelShape, cluster: Cluster) -> tuple[Case, ...]:
    """Return the gain as assumed, and if an assumption is off by half; nothing without a gain."""
    ours, stock = found.ours, found.best_stock
    if ours is None or stock is None:
        return ()
    assumed = Case("as assumed: stock waits for its sends", found.gain)
    return (assumed, *gains_if_off_by_half(shape, cluster, ours, stock))


def rates_of(choice: JudgedCandidate, shape: ModelShape, cluster: Cluster) -> dict[str, float]:
    """Return FLOP/s of a GPU, the part of its peak that the model's are, and tokens/s of all."""
    c, setup = choice.candidate, choice.candidate.setup
    batch = setup.microbatch_size * setup.data_parallel * c.num_microbatches
    flops = flops_of(shape, cluster, c, choice.iteration_s)
    return {
        "flops_per_gpu_s": flops.model,
        "hardware_flops_per_gpu_s": flops.hardware,
        "mfu": flops.model / cluster.gpu_flops_per_s,
        "tokens_per_s": batch * shape.seq_length / choice.iteration_s,
    }


def environment(candidate: Candidate, cluster: Cluster) -> Mapping[str, str]:
    """Return the environment variables that a candidate's flags need.

    Megatron demands one hardware queue for tensor or context parallelism before Blackwell. Ours has
    more streams than CUDA's default of 8 queues.
    """
    setup = candidate.setup
    shares = setup.tensor_parallel > 1 or setup.context_parallel > 1
    if shares and not (cluster.is_blackwell or candidate.preemptive):
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return {} if candidate.is_stock else {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}


def plot(found: Search, file: Path) -> None:
    """Draw time and memory of all that was simulated.

    Raises:
        ValueError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    picture = figure(f"--plot {file}", 7, 4.5)
    axes = picture.add_subplot(
        xlabel="GiB of the fullest GPU", ylabel="seconds of an iteration", yscale="log"
    )
    for is_stock, label in ((True, "stock"), (False, "ours")):
        own = [choice for choice in found.tried if choice.candidate.is_stock == is_stock]
        gib = [choice.device_bytes / 2**30 for choice in own]
        axes.scatter(gib, [choice.iteration_s for choice in own], s=12, label=label, alpha=0.6)
    best = found.choice
    axes.annotate(
        f"{best.candidate.name}, {seconds(best.iteration_s)}",
        (best.device_bytes / 2**30, best.iteration_s),
        textcoords="offset points",
        xytext=(6, -12),
    )
    axes.legend()
    picture.savefig(file)


def seconds(time_s: float) -> str:
    """Return a time with its unit."""
    return f"{time_s:.3f}s" if time_s >= 0.1 else f"{1e3 * time_s:.3f}ms"


def _table(found: Search) -> Iterator[str]:
    """Yield rows by time; what takes as long at the same sizes is one row, with what differs."""
    stock = found.best_stock
    rows = [*found.best, *([stock] if stock and stock not in found.best else ())]
    groups: list[list[JudgedCandidate]] = []
    for row in sorted(rows, key=lambda row: row.iteration_s):
        for group in groups:
            near = row.iteration_s <= (1 + _SAME) * group[0].iteration_s
            if near and _columns(row)[:5] == _columns(group[0])[:5]:
                group.append(row)
                break
        else:
            groups.append([row])
    yield _ROW.format(
        *("iteration", "GiB", "dp", "pp", "tp", "seg", "mbs", "sums", "rec", "limit", "schedule")
    )
    for group in groups:
        first, *alike = sorted(group, key=lambda row: row is not found.choice)
        columns = _columns(first)
        memory = f"{first.device_bytes / 2**30:.1f}"
        limit = first.limit.replace("computation", "compute")
        text = _ROW.format(seconds(first.iteration_s), memory, *columns[:7], limit, columns[7])
        yield text if len(text) <= WIDTH else f"{text[: -len(columns[7])]}\n    {columns[7]}"
        shown = {columns[5:]}
        for row in alike:
            if (other := _columns(row)[5:]) not in shown:
                shown.add(other)
                differs = [new for new, old in zip(other, columns[5:], strict=True) if new != old]
                yield f"          {row.device_bytes / 2**30:>5.1f} as long: {', '.join(differs)}"


def _columns(choice: JudgedCandidate) -> tuple[str, ...]:
    """Return what tells a candidate from others: five sizes, then three choices."""
    c, setup = choice.candidate, choice.candidate.setup
    sizes = setup.data_parallel, c.num_ranks, setup.tensor_parallel, c.num_segments
    sums = "shard" if setup.distributed_optimizer else "whole"
    name = c.name
    if setup.context_parallel > 1:
        name += f" cp={setup.context_parallel}"
    if setup.expert_parallel > 1:
        name += f" ep={setup.expert_parallel}"
    recompute = "stage" if c.recompute_layers else _SHORT[setup.recompute]
    return (*map(str, (*sizes, setup.microbatch_size)), sums, recompute, name)


def _in_16_bits(found: Search) -> Iterator[str]:
    """Say what gradients of 16 bits gain on both sides, and what they change."""
    if not found.in_16_bits:
        return
    yield "if gradients travel in 16 bits, which changes results:"
    for choice in found.in_16_bits:
        c, setup = choice.candidate, choice.candidate.setup
        before = found.best_stock if c.is_stock else found.ours
        less = 0.0 if before is None else 1 - choice.iteration_s / before.iteration_s
        sums = "--use-distributed-optimizer" if setup.distributed_optimizer else "an all-reduce"
        yield f"  {seconds(choice.iteration_s)}, {less:.1%} less: {c.name} with {sums}"
        yield "    " + "\n      ".join(["--grad-reduce-in-bf16", *sums_of(setup)])
    if all(choice.candidate.setup.accumulates_in_fp32 for choice in found.in_16_bits):
        yield "  micro-batches add up in 32 bits; what a replica sends is rounded to 16"
    else:
        yield "  micro-batches add up in 16 bits too, which loses small gradients; memory has no"
        yield f"  room for {LOCAL_FP32} all"


def _assumptions(found: Search, cases: Sequence[Case]) -> Iterator[str]:
    """Say what the gain rests on."""
    if not cases or found.choice.candidate.is_stock:
        return
    yield "the best of ours is faster than the best of stock by"
    first, *others = cases
    yield f"  {first.gain:>6.1%}  {first.assumption}"
    for case in others:
        yield f"  {case.gain:>6.1%}  if {case.assumption}"
