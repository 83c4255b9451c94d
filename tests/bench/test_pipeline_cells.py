"""The pipeline-bound cells of the grid, and their table from runs that nobody had to make."""

from dataclasses import replace

import pytest

from scripts.bench import pipeline_cells
from scripts.bench.pipeline_cells import AHEAD, GAPS, PLACED, PipelineCell
from scripts.bench.variants import DEFAULT
from tests.bench.test_summary import run

CELL = PipelineCell(num_ranks=4, data_parallel=1, num_microbatches=8, transfer=0.4, recompute=False)


def test_a_transfer_takes_its_share_of_a_stages_computation():
    assert CELL.stage_ms == 4 * (9 + 18)
    assert 4 * 16 * 64 * 64 * 8 / CELL.link.rate_bit_s == pytest.approx(0.4 * 0.108)
    recomputed = replace(CELL, num_ranks=8, data_parallel=2, recompute=True)
    assert recomputed.stage_ms == 4 * 4 * (9 + 9 + 18)  # four times as many ranks share the cores


def test_the_bound_counts_the_way_in_and_out():
    # Rank 3 starts after three forwards and transfers, and sends its last gradient as far back.
    way_s = 3 * (0.036 + 0.0432)
    assert CELL.bound_ms == pytest.approx(1e3 * (way_s + 8 * 0.072 + max(8 * 0.036, way_s)))


def test_the_fastest_of_the_sweep_goes_on_beside_ours():
    _, v2, *_ = swept = CELL.swept()
    runs = [run(v, 1, 90.0 if v is v2 else 100.0) for v in [*swept, GAPS, AHEAD, PLACED]]
    assert CELL.chosen(2, runs) == [DEFAULT, v2, GAPS, AHEAD, PLACED]


def test_a_line_has_the_gains_of_the_fastest_of_ours():
    _, v2, *_ = CELL.swept()
    times = {DEFAULT: 2400.0, v2: 1800.0, GAPS: 1600.0, AHEAD: 1400.0, PLACED: 1200.0}
    warmups = {PLACED: 3}
    runs = [
        run(v, n, ms + n, warmup=warmups.get(v, 1)) for n in (1, 2, 3) for v, ms in times.items()
    ]
    *_, line = pipeline_cells.table([(CELL, runs)]).splitlines()
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:3] == ["pp=4 x dp=1, m=8, 40%", "2402", "1802 (v2-n4)"]
    assert cells[3:] == ["1602", "1402", "1202", "1102", "49.9% faster", "99.8% faster", "1.09"]
    assert list(CELL.problems(runs)) == []  # runs that warm up for longer have more losses
