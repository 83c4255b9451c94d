"""What ``fold3d search`` prints: rows, what the gain rests on, the verdict, flags."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from math import prod
from pathlib import Path
from textwrap import wrap

from megatron.fold3d.commands.auto_tries import in_full
from megatron.fold3d.commands.console import faster, faster_between
from megatron.fold3d.commands.pictures import figure
from megatron.fold3d.commands.training_flags import LOCAL_FP32, sums_of
from megatron.fold3d.commands.yours import CHANGES_RESULTS, NOT_MODELLED, Yours
from megatron.fold3d.observe.breakdown import Flops
from megatron.fold3d.observe.digits import digits, seconds
from megatron.fold3d.observe.report.palette import SERIES
from megatron.fold3d.predict.cost_model.cluster import Cluster
from megatron.fold3d.predict.cost_model.efficiency import source_of
from megatron.fold3d.predict.cost_model.model_shape import ModelShape
from megatron.fold3d.predict.search.candidates import Candidate, flops_of
from megatron.fold3d.predict.search.search_result import JudgedCandidate, Search
from megatron.fold3d.predict.search.sensitivity import Case, gains_if_off_by_half

WIDTH = 80
_ROW = "{:>9} {:>5} {:>4} {:>3} {:>2} {:>3} {:>3} {:<5} {:<5} {:<11} {}"
_SAME = 0.002  # of an iteration: times that differ by less are shown as one
_SHOWN = 0.0005  # as a gain: less is spelled 0.0%
_SHORT = {"none": "none", "selective": "sel", "full": "full"}


def lines_of(
    found: Search,
    shape: ModelShape,
    cluster: Cluster,
    flags: Sequence[str],
    own: Yours | None = None,
) -> Iterator[str]:
    """Yield the answer in words.

    Args:
        flags: the lines that end the answer; the first one follows the verdict.
        own: the run of the user's script as it is.
    """
    yield from _table(found, None if own is None else own.run)
    yield f"{found.considered} configurations considered, {found.too_large} too large for memory"
    yield "sums: shard is the distributed optimizer's reduce-scatter, whole an all-reduce"
    yield "limit: what takes the largest share of an iteration beside computation"
    yield f"efficiency of layers: {source_of(cluster)}"
    if any(choice.candidate.offload for choice in found.best):
        flag = "--offload-activations on"
        yield f"{flag}: no GPU has timed it; rows have it where no recomputation makes AIAO fit"
    yield from _in_16_bits(found)
    yield from _coded(found)
    yield from gains_over_yours(found, own) if own else ()
    cases = gains(found, shape, cluster)
    yield from _assumptions(found, cases)
    yield from _expert_places(found.choice.candidate, cluster)
    rates = rates_of(found.choice, shape, cluster)
    yield f"per GPU: {Flops(rates['flops_per_gpu_s'], rates['hardware_flops_per_gpu_s'])}"
    yield f"MFU {rates['mfu']:.1%}; {digits(rates['tokens_per_s'])} tokens/s of all GPUs"
    if found.many_queues_s is not None:
        least, most = map(seconds, found.many_queues_s)
        yield (
            f"with CUDA_DEVICE_MAX_CONNECTIONS=32: {least}, or up to {most} as it may expose "
            f"TP.sync that one queue hides; with 1: {seconds(found.choice.iteration_s)}"
        )
    first, *others = flags
    yield f"{verdict(found, cases)}{first}"
    yield from others


def _expert_places(candidate: Candidate, cluster: Cluster) -> Iterator[str]:
    ranks = candidate.setup.expert_ranks
    if ranks[1] > 1:
        inside = prod(ranks) <= cluster.gpus_per_node
        where = (
            "inside a node" if inside else f"across {prod(ranks) // cluster.gpus_per_node} nodes"
        )
        yield f"experts of a layer: on {prod(ranks)} GPUs, {where}"


def verdict(found: Search, cases: Sequence[Case]) -> str:
    """Return what to do: a gain that an assumption may turn into a loss is to be measured first."""
    if not found.choice.candidate.is_ours:
        return "AIAO gains nothing here, use these stock flags"
    ours, stock, best_stock = found.ours, found.same_layout, found.best_stock
    if ours is None or not cases:
        return "no stock configuration fits; use these flags"
    worst, most = min(cases, key=lambda case: case.gain), max(case.gain for case in cases)
    alike = "no stock configuration fits"
    if stock is not None:
        alike = faster(stock.iteration_s / ours.iteration_s - 1)
    assumed = []
    if ours.candidate.setup.coding_flags:
        assumed.append("GPUs code as fast as their memory allows")
    if best_stock and best_stock.candidate.num_ranks > 1 and not ours.candidate.is_stock:
        assumed.append("stock waits for its sends")
    rests = f", if {' and '.join(assumed)}, which no GPU has confirmed" if assumed else ""
    gains = f"same layout: {alike}; best layout of each: {faster_between(worst.gain, most)}{rests}"
    if worst.gain > 0:
        return f"{gains}; with these flags"
    return (
        f"measure first: {gains}; what decides is {worst.decides}: {worst.measure}; ours has "
        "these flags"
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
    """Draw time and memory of all that was simulated."""
    with figure(f"--plot {file}", 340) as picture:
        axes = picture.add_subplot(
            xlabel="GiB of the fullest GPU", ylabel="seconds of an iteration", yscale="log"
        )
        for is_stock, label, paint in ((True, "stock", SERIES[1]), (False, "ours", SERIES[0])):
            own = [choice for choice in found.tried if choice.candidate.is_stock == is_stock]
            gib = [choice.device_bytes / 2**30 for choice in own]
            axes.scatter(gib, [choice.iteration_s for choice in own], s=12, label=label, c=paint)
        best = found.choice
        axes.annotate(
            f"{best.candidate.name}, {seconds(best.iteration_s)}",
            (best.device_bytes / 2**30, best.iteration_s),
            textcoords="offset points",
            xytext=(6, -12),
        )
        axes.legend()
        picture.savefig(file)


def _table(found: Search, own: JudgedCandidate | None = None) -> Iterator[str]:
    """Yield rows by time; candidates of equal sizes and times share one, with what differs."""
    stock = found.best_stock
    rows = [*found.best, *found.coded]
    rows += [row for row in dict.fromkeys((stock, found.same_layout)) if row and row not in rows]
    groups: list[list[JudgedCandidate]] = []
    for row in sorted((*rows, *([own] if own else ())), key=lambda row: row.iteration_s):
        for group in groups:
            near = row.iteration_s <= (1 + _SAME) * group[0].iteration_s
            alone = own is row or own is group[0]
            if near and not alone and _columns(row)[:5] == _columns(group[0])[:5]:
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
        if first is own:
            columns = (*columns[:7], f"yours: {columns[7]}")
        memory = f"{first.device_bytes / 2**30:.1f}"
        limit = first.limit.replace("computation", "compute")
        text = _ROW.format(seconds(first.iteration_s), memory, *columns[:7], limit, columns[7])
        yield from wrap(text, WIDTH, subsequent_indent="    ", break_on_hyphens=False)
        shown = {columns[5:]}
        for row in alike:
            if (other := _columns(row)[5:]) not in shown:
                shown.add(other)
                differs = [new for new, old in zip(other, columns[5:], strict=True) if new != old]
                yield f"          {row.device_bytes / 2**30:>5.1f} as fast: {', '.join(differs)}"


def _columns(choice: JudgedCandidate) -> tuple[str, ...]:
    """Return what tells a candidate from others: five sizes, then three choices."""
    c, setup = choice.candidate, choice.candidate.setup
    sizes = setup.data_parallel, c.num_ranks, setup.tensor_parallel, c.num_segments
    sums = "shard" if setup.distributed_optimizer else "whole"
    name = c.name
    layers = c.layers if len({*c.layers}) > 1 else ()
    for what, counts in (("layers", layers), ("recompute", c.recompute_layers)):
        if counts:
            name += f" {what}={_in_runs(counts)}"
    if setup.context_parallel > 1:
        name += f" cp={setup.context_parallel}"
    if setup.expert_parallel > 1:
        name += f" ep={setup.expert_parallel}"
    recompute = "stage" if c.recompute_layers else _SHORT[setup.asked_recompute]
    return (*map(str, (*sizes, setup.microbatch_size)), sums, recompute, name)


def _in_runs(counts: Sequence[int]) -> str:
    """Spell the numbers of stages: ``13x2,12,10``."""
    runs = ((count, sum(1 for _ in run)) for count, run in groupby(counts))
    return ",".join(f"{count}x{times}" if times > 1 else str(count) for count, times in runs)


def _in_16_bits(found: Search) -> Iterator[str]:
    """Say what gradients of 16 bits gain on both sides, and what they change."""
    if not found.in_16_bits:
        return
    yield "if gradients travel in 16 bits, which changes results; each beside its own best in 32:"
    for choice in found.in_16_bits:
        c, setup = choice.candidate, choice.candidate.setup
        before = found.best_stock if c.is_stock else found.uncoded
        gain = 0.0 if before is None else before.iteration_s / choice.iteration_s - 1
        sums = "--use-distributed-optimizer" if setup.distributed_optimizer else "an all-reduce"
        yield f"  {seconds(choice.iteration_s)}, {faster(gain)}: {c.name} with {sums}"
        yield "    " + "\n      ".join(["--grad-reduce-in-bf16", *sums_of(setup)])
    gaining = {choice.candidate.is_stock for choice in found.in_16_bits}
    for is_stock, best in ((False, found.uncoded), (True, found.best_stock)):
        if best is not None and is_stock not in gaining:
            replicas = "" if best.candidate.setup.num_replicas > 1 else ", as it has no replicas"
            yield f"  gains nothing: {best.candidate.name}{replicas}"
    if all(choice.candidate.setup.accumulates_in_fp32 for choice in found.in_16_bits):
        yield "  micro-batches add up in 32 bits; what a replica sends is rounded to 16"
    else:
        yield "  micro-batches add up in 16 bits too, which loses small gradients; memory has no"
        yield f"  room for {LOCAL_FP32} all"


def _coded(found: Search) -> Iterator[str]:
    """Say what codes change, and how far what ours gains without them."""
    if not found.coded:
        return
    setup = found.coded[0].candidate.setup
    if setup.gathered_bits:
        yield f"--delta-param-gather sends {setup.gathered_bits:.1f} of a parameter's 16 bits"
    if setup.summed_bits:
        yield f"--coded-grad-reduce sends {setup.summed_share:.0%} of gradients"
    rounds = setup.summed_bits and setup.most_replicas > 2
    yield "  results stay the same" + (", but for the order of sums of replicas" if rounds else "")
    if found.uncoded is not None and found.best_stock is not None:
        gain = found.best_stock.iteration_s / found.uncoded.iteration_s - 1
        yield f"  without codes the best of ours is {faster(gain)} than the best of stock"


def gains_over_yours(found: Search, own: Yours) -> Iterator[str]:
    """Yield by how much each of stock's flags makes the user's run faster, then all together."""
    before_s = own.run.iteration_s

    def row(run: JudgedCandidate, what: str) -> Iterator[str]:
        return _wrapped(f"  {faster(before_s / run.iteration_s - 1):>13}  {what}", 17)

    yield f"yours takes {seconds(before_s)}; try these of stock's flags first, each alone:"
    gaining = [one for one in own.alone if before_s / one.run.iteration_s - 1 >= _SHOWN]
    for one in gaining:
        note = ", which changes results" if one.flags in CHANGES_RESULTS else ""
        yield from row(one.run, one.flags + note)
    if others := [one.flags for one in own.alone if one not in gaining]:
        yield from _wrapped(f"  gain nothing: {', '.join(others)}", 4)
    yield from _wrapped(f"  not modelled: {', '.join(NOT_MODELLED)}", 4)
    for title, stock in (("same layout", own.same_layout), ("any layout", found.best_stock)):
        if stock is not None:
            yield from row(stock, f"stock, {title}: {in_full(stock.candidate)}")
    if own.coded is not None:
        flags = " ".join(own.coded.candidate.setup.coding_flags)
        yield from row(own.coded, f"FOLD3D, your schedule: {flags}")
    if found.choice.candidate.is_ours:
        alike = found.choice.candidate.layout == own.run.candidate.layout
        layout = "same layout" if alike else "any layout"
        yield from row(found.choice, f"FOLD3D, {layout}: {found.choice.candidate.name}")


def _wrapped(text: str, indent: int) -> Iterator[str]:
    """Yield a line, broken at words."""
    further = " " * indent
    return iter(
        wrap(text, WIDTH, subsequent_indent=further, break_on_hyphens=False, break_long_words=False)
    )


def _assumptions(found: Search, cases: Sequence[Case]) -> Iterator[str]:
    """Say what the gain rests on."""
    if not cases or not found.choice.candidate.is_ours:
        return
    yield "the best of ours against the best of stock, any layout:"
    first, *others = cases
    yield f"  {faster(first.gain):>13}  {first.assumption}"
    for case in others:
        yield f"  {faster(case.gain):>13}  if {case.assumption}"
