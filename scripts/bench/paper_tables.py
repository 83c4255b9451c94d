"""Compare the paper's Tables II and III with what the simulator predicts for their rows.

    python scripts/bench/paper_tables.py tests/data/fold3d_tables.json --calibrate-on "GPT-3 18B"

Prints published, predicted and error per row and column. What is fitted, and how, is said by
`megatron.fold3d.predict.paper.table_rows`.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron.fold3d.predict.paper.published_rows import COLUMNS, Row, Tables, published_ms
from megatron.fold3d.predict.paper.table_rows import Fit, calibrate, error, predict


def compare(tables: Tables, fit: Fit, calibrated: list[Row]) -> list[dict[str, Any]]:
    """Return, per row, what was published, what is predicted, and the error."""
    rows = []
    for row in tables.rows:
        predicted = predict(tables, row, fit)
        columns = {
            name: {"published": row[name], "predicted": round(predicted[name], 1)}
            for name in COLUMNS
            if name in predicted
        }
        rows.append(
            {
                **{key: row[key] for key in ("cluster", "model", "system")},
                "calibration": row in calibrated,
                "iteration_ms_published": round(published_ms(row), 3),
                "iteration_ms_predicted": round(sum(predicted.values()), 3),
                "error": round(error(row, predicted), 5),
                "columns": columns,
                "misprints": tables.misprints(row),
            }
        )
    return rows


def main() -> int:
    """Read the tables named on the command line, calibrate, predict, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", type=Path, help="published rows, JSON")
    parser.add_argument("--calibrate-on", required=True, metavar="MODEL", help="such as GPT-3 18B")
    parser.add_argument("--json", action="store_true", help="print a list of rows as JSON")
    arguments = parser.parse_args()
    try:
        tables = Tables.read(arguments.tables)
        calibrated = [row for row in tables.rows if row["model"] == arguments.calibrate_on]
        fit = calibrate(tables, calibrated)
        rows = compare(tables, fit, calibrated)
    except (KeyError, OSError, TypeError, ValueError) as found:
        parser.error(f"{arguments.tables}: {found}")
    if arguments.json:
        print(json.dumps(rows, indent=1))
    else:
        print_table(rows, fit, tables)
    return 0


def print_table(rows: list[dict[str, Any]], fit: Fit, tables: Tables) -> None:
    """Print the rows for people, and what to know about them."""
    print(f"Fitted: {fit.task_overhead_s * 1e3:.2f} ms overhead per task of a model chunk")
    for cluster, rate in fit.sync_bytes_per_s.items():
        gather = fit.gather_bytes_per_s[cluster]
        print(f"  {cluster}: {rate / 1e9:.2f} GB/s per node, ZeRO-3 gathers at {gather / 1e9:.2f}")
    print("\nMilliseconds, published > predicted; * calibration, ! see below")
    names = [name.removesuffix("_ms") for name in COLUMNS]
    print(f"{'':36}{'iteration':>17}{'error':>8} " + "".join(f"{name:>15}" for name in names))
    for row in rows:
        mark = "*" * row["calibration"] + "!" * bool(row["misprints"])
        name = f"{row['cluster']:<9}{row['model']:<10} {row['system']:<12} {mark:<2}"
        total = f"{row['iteration_ms_published']:.0f} > {row['iteration_ms_predicted']:.0f}"
        cells = (
            f"{c['published'] or 0:.0f} > {c['predicted']:.0f}" if c else "-"
            for c in map(row["columns"].get, COLUMNS)
        )
        print(f"{name:<36}{total:>17}{row['error']:>+8.1%} " + "".join(f"{c:>15}" for c in cells))
    if errors := [abs(row["error"]) for row in rows if row["system"] != "DSpeedZ3"]:
        print(f"\n3D rows: mean error {fmean(errors):.1%}, largest {max(errors):.1%}")
    for row in rows:
        for text in row["misprints"]:
            print(f"! {row['cluster']} {row['model']} {row['system']}: {text}")
    for text in tables.flags:
        print(f"! {text}")


if __name__ == "__main__":
    sys.exit(main())
