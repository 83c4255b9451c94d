"""How many layers each stage of a rank keeps: against every other choice, on small plans."""

from collections.abc import Mapping, Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.fold3d.plan.ir import Op, Plan, Program
from megatron.fold3d.plan.passes.recompute import recompute_early, recomputed
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.policy.recompute_choice import (
    LayerBytes,
    StageBytes,
    fewest_counts,
    kept_layers,
    most_live,
)


def sizes(limit: float, *, kept: float = 10.0, recomputed: float = 1.0) -> LayerBytes:
    return LayerBytes(static=50.0, working=10.0, kept=kept, recomputed=recomputed, limit=limit)


def predicted_peak(
    live: Sequence[Mapping[int, int]],
    layers: Mapping[int, int],
    kept: Mapping[int, int],
    sizes: LayerBytes,
) -> float:
    """Return the bytes that a rank takes at its worst moment."""

    def of_microbatch(stage: int) -> float:
        own = kept[stage]
        return own * sizes.kept + (layers[stage] - own) * sizes.recomputed

    held = (sum(n * of_microbatch(stage) for stage, n in moment.items()) for moment in live)
    return sizes.static + sizes.working + max(held)


def live_of(text: str) -> list[dict[int, int]]:
    return [dict(moment) for moment in most_live(Plan.from_text(text).programs[0])]


def test_only_the_worst_moments_count():
    assert live_of("0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1") == [{0: 2, 1: 1}]
    assert live_of("0F0 0F1 0B0 0B1 1F0 1B0 1F1 1B1") == [{0: 2}, {1: 1}]
    assert live_of("0F0 0F1 0B0 0W0 0B1 0W1") == [{0: 2}]


def test_aiao_keeps_the_layers_of_its_last_segment_first():
    plan = build("aiao", num_ranks=2, num_segments=2, num_microbatches=8)
    live = most_live(plan.programs[1])
    assert [dict(moment) for moment in live] == [{1: 8, 3: 1}]  # the last segment is 1F1B
    # 50 + 10, an input for each layer of the nine micro-batches (36), and 36 more for four layers.
    fits = kept_layers(live, {1: 4, 3: 4}, sizes(132.0))
    assert fits == {1: 0, 3: 4}
    assert predicted_peak(live, {1: 4, 3: 4}, fits, sizes(132.0)) == 132.0
    assert kept_layers(live, {1: 4, 3: 4}, sizes(131.0)) == {1: 0, 3: 3}


def test_what_fits_nowhere_is_an_error():
    live = [{0: 4}]
    with pytest.raises(ValueError, match=r"found 68 bytes .* 67 bytes of memory; raise"):
        kept_layers(live, {0: 2}, sizes(67.0))


def every_choice(layers: Mapping[int, int]) -> Sequence[dict[int, int]]:
    counts = product(*(range(n + 1) for n in layers.values()))
    return [dict(zip(layers, kept, strict=True)) for kept in counts]


@settings(max_examples=60)
@given(
    live=st.lists(
        st.fixed_dictionaries({stage: st.integers(0, 5) for stage in range(3)}),
        min_size=1,
        max_size=4,
    ),
    layers=st.fixed_dictionaries({stage: st.integers(1, 4) for stage in range(3)}),
    limit=st.integers(60, 900),
)
def test_no_other_choice_that_fits_keeps_more(
    live: list[dict[int, int]], layers: dict[int, int], limit: int
):
    these = sizes(float(limit))
    feasible = [
        choice
        for choice in every_choice(layers)
        if predicted_peak(live, layers, choice, these) <= limit
    ]
    if not feasible:
        with pytest.raises(ValueError, match="with all layers recomputed"):
            kept_layers(live, layers, these)
        return
    found = kept_layers(live, layers, these)
    assert predicted_peak(live, layers, found, these) <= limit
    assert sum(found.values()) == max(sum(choice.values()) for choice in feasible)


@pytest.mark.parametrize("schedule", ["aiao", "1f1b", "interleaved", "zb-h1"])
def test_the_best_choice_of_a_schedule_is_found(schedule: str):
    segments = 1 if schedule in ("1f1b", "zb-h1") else 2
    plan = build(schedule, num_ranks=3, num_segments=segments, num_microbatches=5)
    for rank, program in enumerate(plan.programs):
        layers = dict.fromkeys(range(rank, 3 * segments, 3), 3)
        live = most_live(program)
        for limit in range(100, 400, 20):
            these = sizes(float(limit))
            fits = [
                choice
                for choice in every_choice(layers)
                if predicted_peak(live, layers, choice, these) <= limit
            ]
            if fits:
                best = max(sum(choice.values()) for choice in fits)
                assert sum(kept_layers(live, layers, these).values()) == best


def played_peak(program: Program, stages: Mapping[int, StageBytes], kept: Mapping[int, int]) -> int:
    """What a rank holds at most: each layer of each micro-batch, one operation after another."""
    early, held, peak = recomputed(program), 0, 0
    for stage, op, microbatch in program:
        its = stages[stage]
        if op is Op.FORWARD:
            held += int(its.recomputed + kept[stage] * its.kept)
        elif op is Op.RECOMPUTE:
            held += int((its.layers - kept[stage]) * its.kept)
        elif (stage, microbatch) in early:
            held -= int(its.recomputed + its.layers * its.kept)
        else:
            held -= int(kept[stage] * its.kept)
            if kept[stage] < its.layers:
                peak = max(peak, held + int(its.kept))  # one layer after the other
            held -= int(its.recomputed)
        peak = max(peak, held)
    return peak


@settings(max_examples=60)
@given(
    schedule=st.sampled_from(["aiao", "1f1b", "interleaved"]),
    early=st.sets(st.integers(0, 3)),
    layers=st.integers(0, 3),
    limit=st.integers(20, 400),
)
def test_a_measured_choice_is_the_best_and_its_peak_is_exact(
    schedule: str, early: set[int], layers: int, limit: int
):
    segments = 1 if schedule == "1f1b" else 2
    plan = build(schedule, num_ranks=2, num_segments=segments, num_microbatches=4)
    for rank, program in enumerate(recompute_early(plan, early).programs):
        stages = {
            stage: StageBytes(layers=layers, recomputed=3.0 + stage, kept=10.0)
            for stage in range(rank, 2 * segments, 2)
        }
        counts = every_choice(dict.fromkeys(stages, layers))
        peaks = [(sum(kept.values()), played_peak(program, stages, kept)) for kept in counts]
        fits = [total for total, peak in peaks if peak <= limit]
        if not fits:
            with pytest.raises(ValueError, match="with all layers recomputed"):
                fewest_counts(program, stages, limit)
            continue
        found = fewest_counts(program, stages, limit)
        kept = {stage: layers - count for stage, count in found.recomputed.items()}
        assert sum(kept.values()) == max(fits)
        assert found.peak_bytes == played_peak(program, stages, kept) <= limit
