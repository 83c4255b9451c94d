"""How many layers each stage of a rank keeps: against every other choice, on small plans."""

from collections.abc import Mapping, Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.fold3d.plan.ir import Action, Op, Plan, Program
from megatron.fold3d.plan.passes.recompute import recompute_early, recomputed
from megatron.fold3d.policy.recompute_choice import StageBytes, fewest_counts
from tests.plans import built

Live = Sequence[Mapping[int, int]]
"""Micro-batches that are held, by stage, at each moment."""
BESIDE = 60.0
INPUT, KEPT = 1.0, 10.0  # of a layer that is recomputed, and of one that is not


def predicted_peak(live: Live, layers: Mapping[int, int], kept: Mapping[int, int]) -> float:
    """Return the bytes that a rank takes at its worst moment."""

    def of_microbatch(stage: int) -> float:
        return kept[stage] * KEPT + (layers[stage] - kept[stage]) * INPUT

    held = (sum(n * of_microbatch(stage) for stage, n in moment.items()) for moment in live)
    return BESIDE + max(held)


def kept_layers(program: Program, layers: Mapping[int, int], limit: float) -> dict[int, int]:
    """Return how many layers each stage keeps; what a backward recomputes is among `BESIDE`."""
    stages = {
        stage: StageBytes(layers=n, recomputed=n * INPUT, kept=KEPT - INPUT)
        for stage, n in layers.items()
    }
    found = fewest_counts(program, stages, limit, beside=BESIDE, in_backwards=False)
    return {stage: n - found.recomputed[stage] for stage, n in layers.items()}


def program_of(live: Live) -> Program:
    """Return a program that holds as many micro-batches at each moment, and then frees them."""
    actions: list[Action] = []
    for moment in live:
        held = [(stage, m) for stage, count in moment.items() for m in range(count)]
        for op in (Op.FORWARD, Op.BACKWARD):
            actions += [Action(stage, op, m) for stage, m in held]
    return tuple(actions)


def held_in(program: Program) -> Live:
    """Return what a program holds after each of its actions."""
    splits = {stage for stage, op, _ in program if op is Op.WEIGHT}
    held: dict[int, int] = {}
    moments = []
    for stage, op, _ in program:
        frees = op is (Op.WEIGHT if stage in splits else Op.BACKWARD)
        held[stage] = held.get(stage, 0) + (op is Op.FORWARD) - frees
        moments.append(dict(held))
    return moments


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1", 2 * KEPT + 1 * KEPT),
        ("0F0 0F1 0B0 0B1 1F0 1B0 1F1 1B1", 2 * KEPT),
        ("0F0 0F1 0B0 0W0 0B1 0W1", 2 * KEPT),
        ("0F0 0F1 0B0 0B1 0W:500 1F0 1F1 1B0 1B1 0W:1000", 3 * KEPT),
    ],
)
def test_a_layer_is_held_until_what_reads_it_has_run(text: str, most: float):
    program = Plan.from_text(text).programs[0]
    layers = dict.fromkeys({stage for stage, _, _ in program}, 1)
    assert kept_layers(program, layers, BESIDE + most) == layers
    assert kept_layers(program, layers, BESIDE + most - 1) != layers


def test_aiao_keeps_the_layers_of_its_last_segment_first():
    plan = built("aiao", 2, 2, 8)
    program, layers = plan.programs[1], {1: 4, 3: 4}
    # 60, an input for each layer of the nine micro-batches (36), and 36 more for four layers: the
    # last segment is 1F1B.
    fits = kept_layers(program, layers, 132.0)
    assert fits == {1: 0, 3: 4}
    assert predicted_peak(held_in(program), layers, fits) == 132.0
    assert kept_layers(program, layers, 131.0) == {1: 0, 3: 3}


def test_what_fits_nowhere_is_an_error():
    with pytest.raises(ValueError, match=r"found 68 bytes .* 67 bytes of memory; raise"):
        kept_layers(program_of([{0: 4}]), {0: 2}, 67.0)


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
def test_no_other_choice_that_fits_keeps_more(live, layers, limit):
    feasible = [
        choice for choice in every_choice(layers) if predicted_peak(live, layers, choice) <= limit
    ]
    if not feasible:
        with pytest.raises(ValueError, match="with all layers recomputed"):
            kept_layers(program_of(live), layers, limit)
        return
    found = kept_layers(program_of(live), layers, limit)
    assert predicted_peak(live, layers, found) <= limit
    assert sum(found.values()) == max(sum(choice.values()) for choice in feasible)


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
def test_a_measured_choice_is_the_best_and_its_peak_is_exact(schedule, early, layers, limit):
    segments = 1 if schedule == "1f1b" else 2
    plan = built(schedule, 2, segments, 4)
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
