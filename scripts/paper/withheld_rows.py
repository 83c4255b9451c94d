"""The eight rows of Tables II and III that no file of ours has, and what the text says of them.

The text that this project was given leaves them out, as an independent check. Nothing was fitted
to them. Five of them are mentioned elsewhere, in the paper's sentences or in notes on its sums:
`SAID` has these numbers, each with its place.
"""

from scripts.paper.published_rows import COLUMNS, Row

_LAYOUTS = (
    ("A100x128", "GPT-3 39B", 256, 4, 4),
    ("V100x64", "GPT-3 39B", 128, 2, 4),
    ("A100x128", "BERT", 256, 4, 4),
    ("A100x128", "T-NLG", 256, 8, 2),
)  # cluster, model, batch, dp, pp; tp is 8, and Fold3D has 4 segments

# "Notes" are those of tests/data/fold3d_tables.json.
SAID: dict[tuple[str, str, str], Row] = {
    ("A100x128", "GPT-3 39B", "Fold3D"): {
        "thrp_tflops": 116.1,  # Sec. VI-A
        "excmem_gb": 12.9,  # Sec. VI-A
        "dpsync_ms": 1976.8 * (1 - 0.726),  # Sec. VI-A: 72.6% less than Megatron-SP
        "iteration_ms": 7126.2 / 1.329,  # notes: Megatron-SP's columns are 1.329 of its
    },
    ("A100x128", "GPT-3 39B", "DSpeed3D"): {"thrp_tflops": 78.3},  # notes
    ("V100x64", "GPT-3 39B", "Fold3D"): {
        "thrp_tflops": 51.1,  # Sec. VI-A; the notes have 51.6
        "fwd_ms": 2901.7,  # Table IV
        "bwd_ms": 7902.3,  # Table IV
        "dpsync_ms": 670.0,  # below Table II
        "ppsync_ms": 410.0,  # below Table II
        "iteration_ms": 15318.6 / 1.231,  # notes
    },
    ("A100x128", "BERT", "Fold3D"): {
        "excmem_gb": 17.3,  # notes
        "iteration_ms": 10758.6 / 1.233,  # notes
    },
    ("A100x128", "T-NLG", "Fold3D"): {
        "thrp_tflops": 96.9,  # notes
        "util_pct": 30.4,  # notes
        "excmem_gb": 11.2,  # notes
        "iteration_ms": 5732.2,  # notes
    },
}


def withheld_rows() -> list[Row]:
    """Return the rows: their layouts, what is said of them, and None for the rest."""
    rows = []
    for cluster, model, batch, dp, pp in _LAYOUTS:
        for system, segments in (("Fold3D", 4), ("DSpeed3D", None)):
            layout = {"cluster": cluster, "model": model, "system": system, "batch": batch}
            layout |= {"dp": dp, "pp": pp, "tp": 8, "ns": segments}
            said = SAID.get((cluster, model, system), {})
            rows.append(dict.fromkeys(COLUMNS) | layout | said | {"withheld": True})
    return rows
