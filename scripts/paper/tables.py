"""Tables II and III, and the figures that show parts of them: all 32 rows, predicted."""

from functools import cache
from pathlib import Path

from scripts.paper.published_rows import COLUMNS, SIZES, Row, Tables, published_ms
from scripts.paper.results import Grid, Number, Result
from scripts.paper.row_sizes import predict_sizes
from scripts.paper.table_rows import Fit, calibrate, predict
from scripts.paper.withheld_rows import withheld_rows

FILE = Path(__file__).parents[2] / "tests/data/fold3d_tables.json"
CALIBRATION = "GPT-3 18B"
"""The model whose rows the constants are fitted to; all others are predictions."""
_ITERATION = "iteration_ms"
_ROMAN = {"II": ("GPT-3 18B", "GPT-3 39B"), "III": ("BERT", "T-NLG", "CPM", "T5")}


@cache
def published() -> tuple[Tables, Fit]:
    """Return the paper's rows, and the constants that are fitted to those of `CALIBRATION`."""
    tables = Tables.read(FILE)
    return tables, calibrate(tables, [r for r in tables.rows if r["model"] == CALIBRATION])


@cache
def predicted(cluster: str, model: str, system: str) -> tuple[Row, dict[str, float]]:
    """Return a row of the paper and all columns that are predicted for it.

    Raises:
        KeyError: the paper has no such row.
    """
    tables, fit = published()
    for row in (*tables.rows, *withheld_rows()):
        if (row["cluster"], row["model"], row["system"]) == (cluster, model, system):
            columns = predict(tables, row, fit)
            iteration_ms = sum(columns.values())
            sizes = predict_sizes(tables, row, iteration_ms)
            return row, {_ITERATION: iteration_ms, **columns, **sizes}
    raise KeyError(f"no row of {system}, {model} on {cluster}")


def table2() -> Result:
    """Table II: five systems train GPT-3 on both clusters."""
    return _table("table2", "II")


def table3() -> Result:
    """Table III: four systems train four other models on the A100 cluster."""
    return _table("table3", "III")


def _table(name: str, number: str) -> Result:
    tables, fit = published()
    of_table = [row for row in (*tables.rows, *withheld_rows()) if row["model"] in _ROMAN[number]]
    keys = list(dict.fromkeys((row["cluster"], row["model"]) for row in of_table))
    rows = sorted(of_table, key=lambda row: keys.index((row["cluster"], row["model"])))
    numbers = []
    for row in rows:
        row, ours = predicted(row["cluster"], row["model"], row["system"])
        theirs = row | {_ITERATION: published_ms(row) or None}
        numbers += [
            Number(_label(row), column.partition("_")[0], ours.get(column), theirs.get(column))
            for column in (_ITERATION, *COLUMNS, *SIZES)
            if column in ours or theirs.get(column) is not None
        ]
    rates = [f"{c} {rate / 1e9:.2f} GB/s" for c, rate in fit.sync_bytes_per_s.items()]
    notes = [
        "computation is that of each model's Megatron row, so its fwd and bwd are no predictions",
        "* fitted to; w withheld, of which the text alone says something (withheld_rows.py)",
        f"fitted: {fit.task_overhead_s * 1e3:.2f} ms per task of a model chunk; "
        f"per node {', '.join(rates)}",
        *(f"{_label(row)}: {text}" for row in rows for text in tables.misprints(row)),
    ]
    grid = Grid(
        title="Milliseconds, GB of a GPU and of a host, TFLOP/s of a GPU, % of its peak",
        numbers=tuple(numbers),
        drawn=("iteration",),
    )
    title = f"Table {number}, breakdown of an iteration by system"
    return Result(name=name, title=title, grids=(grid,), notes=tuple(notes))


def _label(row: Row) -> str:
    mark = "*" * (row["model"] == CALIBRATION) + "w" * ("withheld" in row)
    return f"{row['cluster']} {row['model']} {row['system']} {mark}".strip()
