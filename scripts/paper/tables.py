"""Tables II and III, and the figures that show parts of them: all 32 rows, predicted."""

from functools import cache, partial
from math import prod

from megatron.fold3d.predict.cost_model.model_shape import model_shape
from scripts.paper.points import Point, Times, model_share, tflops
from scripts.paper.published_rows import COLUMNS, SIZES, Row, Tables, published_ms, shape_name
from scripts.paper.results import Grid, Number, Result
from scripts.paper.row_sizes import predict_sizes
from scripts.paper.table_rows import Fit, calibrate, predict
from scripts.paper.withheld_rows import withheld_rows

CALIBRATION = "GPT-3 18B"
"""The model whose rows the constants are fitted to; all others are predictions."""
_ITERATION = "iteration_ms"
_TFLOPS = {"thrp_tflops": "hardware TFLOP/s", "model_tflops": "model TFLOP/s"}
_ROMAN = {"II": ("GPT-3 18B", "GPT-3 39B"), "III": ("BERT", "T-NLG", "CPM", "T5")}


@cache
def published() -> tuple[Tables, Fit]:
    """Return the paper's rows, and the constants that are fitted to those of `CALIBRATION`."""
    tables = Tables.read()
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


def _table(name: str, number: str, times: Times | None = None) -> Result:
    """Return a table's rows, simulated or as ``times`` measured."""
    tables, fit = published()
    of_table = [row for row in (*tables.rows, *withheld_rows()) if row["model"] in _ROMAN[number]]
    keys = list(dict.fromkeys((row["cluster"], row["model"]) for row in of_table))
    rows = sorted(of_table, key=lambda row: keys.index((row["cluster"], row["model"])))
    numbers = []
    for row in rows:
        spread = None
        if times:
            ours, spread = _measured(row, times, tables.peak_tflops[row["cluster"]])
        else:
            row, ours = predicted(row["cluster"], row["model"], row["system"])
        theirs = row | {_ITERATION: published_ms(row) or None}
        numbers += [
            Number(
                _label(row),
                _TFLOPS.get(column, column.partition("_")[0]),
                ours.get(column),
                theirs.get(column),
                spread if column == _ITERATION else None,
            )
            for column in (_ITERATION, *COLUMNS, *SIZES, "model_tflops")
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
        axis="ms of an iteration",
        numbers=tuple(numbers),
        bars={_label(row): _bar(row) for row in rows},
        drawn=("iteration",),
    )
    title = f"Table {number}, breakdown of an iteration by system"
    return Result(name=name, title=title, grids=(grid,), notes=tuple(notes))


table2 = partial(_table, "table2", "II")
"""Five systems train GPT-3 on both clusters."""
table3 = partial(_table, "table3", "III")
"""Four systems train four other models on the A100 cluster."""
_SYSTEMS = {"Fold3D": "fold3d", "DSpeed3D": "dspeed3d", "DSpeedZ3": "zero3"}


def _measured(
    row: Row, times: Times, peak_tflops: float
) -> tuple[dict[str, float], tuple[float, float] | None]:
    """Return the columns that a run of a row's system has, and the quartiles of its iterations."""
    point = point_of(row)
    found = times(point, _SYSTEMS.get(row["system"], "megatron")) if point else None
    if point is None or found is None:
        return {}, None
    parts = found.parts
    each = (parts.forward_s, parts.backward_s, parts.bubble_s, parts.grad_sync_s, parts.p2p_s)
    columns = {_ITERATION: found.total_s * 1e3}
    if parts.backward_s:  # else the run has no trace
        columns |= {name: s * 1e3 for name, s in zip(COLUMNS, each, strict=True)}
    for column, held in (("gmem_gb", found.gpu_bytes), ("excmem_gb", found.host_bytes)):
        if held is not None:
            columns[column] = held / 1e9
    rate = tflops(point, found.total_s)
    columns |= {"thrp_tflops": rate, "util_pct": rate / peak_tflops * 100}
    columns["model_tflops"] = rate * model_share(model_shape(point.model))
    low_s, high_s = found.quartiles_s or (found.total_s, found.total_s)
    return columns, (low_s * 1e3, high_s * 1e3)


def point_of(row: Row) -> Point | None:
    """Return the job of a row; None for T5, which Megatron-core cannot train in a pipeline."""
    model = shape_name(row["model"])
    node, _, gpus = row["cluster"].lower().partition("x")
    if model == "t5":
        return None
    sizes = {"dp": row["dp"], "pp": row["pp"] or 1, "tp": row["tp"] or 1}
    if model == "t-nlg" and sizes["tp"] == 8:  # which does not divide its 28 heads
        sizes |= {"pp": 2 * sizes["pp"], "tp": 4}
    assert prod(sizes.values()) == int(gpus)
    return Point(node=node, model=model, batch=row["batch"], segments=row["ns"] or 4, **sizes)


def _bar(row: Row) -> tuple[str, str]:
    """Return the group of a row's bar, and its system by name."""
    mark = " (fitted)" * (row["model"] == CALIBRATION)
    group = f"{row['cluster']} {row['model']}{mark}"
    return group, _SYSTEMS.get(row["system"], "megatron")


def _label(row: Row) -> str:
    mark = "*" * (row["model"] == CALIBRATION) + "w" * ("withheld" in row)
    return f"{row['cluster']} {row['model']} {row['system']} {mark}".strip()
