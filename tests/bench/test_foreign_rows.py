from math import isnan

import pytest

from scripts.bench.foreign_rows import Score, Table, compare, is_held, tables, vtrain

CSV = """Parameters (billion),# GPUs,global batch,micro batch,hidden size,attention heads,# layers,\
sequence length,tensor parallelism,data parallelism,pipeline parallelism,iteration time (ms)
0.1,16,32,1,256,4,4,128,2,8,1,10.5
0.1,16,32,2,256,4,4,128,1,8,2,20
"""


def test_every_second_row_is_held():
    assert [is_held(row) for row in (1, 2, 3, 4)] == [False, True, False, True]
    by_name = {table.name: table.rows for table in tables()}
    assert [row.held for row in by_name["Korthikanti 2022, Table 5"]] == 4 * [False, True]
    slow = by_name["DT-FM V100, slow networks"]
    assert [row.held for row in slow] == 3 * [False, True, True]


def test_vtrains_rows_are_read_from_its_file(tmp_path):
    (tmp_path / "rows.csv").write_text(CSV, encoding="utf-8-sig")
    first, second = vtrain(str(tmp_path / "rows.csv")).rows
    assert (first.table, first.seconds, first.held, second.held) == (
        "vTrain 0.1B",
        0.0105,
        False,
        True,
    )
    assert second.candidate.num_ranks == 2
    assert second.candidate.num_microbatches == 2
    assert second.predict() > 0


def test_a_scaled_table_takes_the_first_row_of_a_model_as_measured():
    found = next(table for table in tables() if table.name.endswith("15B BF16"))
    first, second = compare(Table(found.name, found.rows[:2], found.scaled))
    assert not first.compared
    assert first.predicted == pytest.approx(first.row.seconds, rel=1e-3)
    assert second.compared
    assert second.predicted == pytest.approx(second.row.seconds, rel=0.03)


def test_regret_is_of_the_run_that_was_predicted_to_be_fastest():
    score = Score.of([(1.0, 2.0), (1.1, 1.0), (4.0, 3.0)])
    assert score.regret == pytest.approx(0.1)
    assert score.rank == pytest.approx(0.5)
    assert isnan(Score.of([(1.0, 1.0)]).rank)
