import pytest

from megatron.fold3d.observe.training_log import LoggedIteration, Spread
from scripts.bench import summary
from scripts.bench.summary import Run
from scripts.bench.variants import DEFAULT, Variant

SWEPT = Variant("stock-v2-n4", ("--num-virtual-stages-per-pipeline-rank", "2"))
OURS = Variant("aiao-s2", ("--schedule", "aiao"))
RATE_BIT_S = 80e6  # a byte takes 100 ns


def run(variant, number, *times_ms, warmup=1, losses=None, **given):
    """One run whose first iterations are warm-up."""
    iterations = tuple(
        LoggedIteration(number=n, elapsed_ms=ms, loss=(losses or {}).get(n, 4.0 / n))
        for n, ms in enumerate((*[9999.0] * warmup, *times_ms), 1)
    )
    return Run(variant=variant, round=number, iterations=iterations, warmup=warmup, **given)


RUNS = [
    run(DEFAULT, 0, 100.0, 100.0),
    run(SWEPT, 0, 80.0, 80.0),
    run(OURS, 0, 80.0, 80.0),
    run(DEFAULT, 1, 198.0, 202.0, link_bytes=1e6),
    run(DEFAULT, 2, 200.0, 200.0, link_bytes=1e6),
    *(run(SWEPT, number, 160.0, 160.0, link_bytes=1.2e6) for number in (1, 2)),
    *(run(OURS, number, 150.0, 150.0, link_bytes=1.2e6) for number in (1, 2)),
]


def test_rounds_are_pooled_and_the_warm_up_is_left_out():
    first = summary.rows(RUNS, RATE_BIT_S)[0]
    assert first.variant == DEFAULT
    assert first.spread == Spread(200.0, 199.5, 200.5)


def test_the_bound_is_the_larger_of_compute_and_communication():
    default, swept, _ = summary.rows(RUNS, RATE_BIT_S)
    assert (default.compute_ms, default.communication_ms, default.bound_ms) == (100.0, 100.0, 100.0)
    assert (swept.compute_ms, swept.bound_ms) == (80.0, pytest.approx(120.0))


def test_the_table_has_gains_over_the_strongest_and_the_default_and_ratios_to_the_bound():
    assert summary.table(summary.rows(RUNS, RATE_BIT_S)).splitlines() == [
        "| variant | iteration ms (quartiles) | to stock, same layout | to its default | "
        "compute ms | link ms | of the bound |",
        "|---|--:|--:|--:|--:|--:|--:|",
        "| stock-default | 200 (200-200) | 20.0% slower | 0.0% faster | 100 | 100 | 2.00 |",
        "| **stock-v2-n4** | 160 (160-160) | 0.0% faster | 25.0% faster | 80 | 120 | 1.33 |",
        "| aiao-s2 | 150 (150-150) | 6.7% faster | 33.3% faster | 80 | 120 | 1.25 |",
    ]


def test_a_loss_that_differs_in_one_iteration_is_reported():
    odd = run(OURS, 3, 150.0, 150.0, losses={3: 4.0 / 3 * 1.001})
    largest, lines = summary.loss_disagreements([*RUNS, odd], 1e-5)
    assert largest == pytest.approx(1e-3)
    assert lines == ["aiao-s2, round 3: losses differ by 1.0e-03"]


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_disagrees(loss):
    odd = run(OURS, 3, 150.0, 150.0, losses={2: loss})
    assert len(summary.loss_disagreements([*RUNS, odd], 1e-5)[1]) == 1


def test_a_skipped_update_disagrees_with_a_loss():
    odd = Run(variant=OURS, round=3, iterations=(LoggedIteration(number=1, elapsed_ms=1.0),))
    assert len(summary.loss_disagreements([*RUNS, odd], 1e-5)[1]) == 1
