"""Table IV and Fig. 5: where the time of an iteration goes, by simulation and by equations."""

from collections.abc import Mapping

from megatron.fold3d.policy.num_segments import overlapping_s
from megatron.fold3d.predict.cost_model.cluster import NODES
from megatron.fold3d.predict.cost_model.model_shape import SHAPES
from megatron.fold3d.predict.cost_model.sizes import Setup, layer_bytes
from scripts.paper.perf_model import (
    aiao_activation_bytes,
    bubble_s,
    exposed_s,
    interleaved_activation_bytes,
    overlapped_s,
    p2p_s,
    serialized_s,
)
from scripts.paper.points import Point
from scripts.paper.published_rows import MICROBATCH_SIZE, Row, shape_name
from scripts.paper.results import Grid, Number, Published, Result, claims
from scripts.paper.simulated import iteration
from scripts.paper.tables import predicted, published


def table4() -> Result:
    """Table IV: what a node copies to its host memory and back, beside its computation."""
    rows = {  # MiB of a checkpoint, then milliseconds
        "bert": (56.6, 4081.2, 11271.7, 2343.8),
        "gpt3-39b": (64.0, 2901.7, 7902.3, 1472.5),
        "cpm": (40.0, 1673.2, 4707.9, 1097.3),
    }
    numbers, hidden = [], []
    for model, (act_mib, fwd_ms, bwd_ms, copies_ms) in rows.items():
        point = Point(node="v100", model=model, batch=128, dp=2, pp=4, tp=8)
        found = iteration(point, "fold3d").parts
        saved = layer_bytes(SHAPES[model], Setup(microbatch_size=MICROBATCH_SIZE), "full")
        layers = SHAPES[model].num_layers / point.pp
        host_bytes = aiao_activation_bytes(1, point.layout.microbatches, saved * layers)
        copied_s = 2 * host_bytes / NODES["v100"].host_copy_bytes_per_s
        hidden.append(copied_s < found.forward_s + found.backward_s)
        numbers += [
            Number(model, "checkpoint MiB", saved / 2**20, act_mib),
            Number(model, "fwd", found.forward_s * 1e3, fwd_ms),
            Number(model, "bwd", found.backward_s * 1e3, bwd_ms),
            Number(model, "copies", copied_s * 1e3, copies_ms),
        ]
    return Result(
        name="table4",
        title="Table IV, cost of offloading on V100, micro-batches of 4",
        grids=(Grid(title="ms", numbers=tuple(numbers), drawn=_COSTS, axis="ms of an iteration"),),
        verdicts=(("copies take less time than forwards and backwards", all(hidden)),),
        notes=(
            "layouts of BERT and CPM are taken from GPT-3 39B; their rates from their A100 rows",
        ),
    )


def fig5() -> Result:
    """Fig. 5: where the time of two models goes, in FOLD3D and in Megatron, and by equations."""
    numbers: list[Number] = []
    closed: list[Number] = []
    found: list[tuple[str, Published, float]] = []
    for model, system, less in (
        ("GPT-3 18B", "Megatron-PTD", 0.689),
        ("GPT-3 39B", "Megatron-SP", 0.726),
    ):
        ours, theirs = (predicted("A100x128", model, name) for name in ("Fold3D", system))
        for name, (row, columns) in (("Fold3D", ours), (system, theirs)):
            numbers += [
                Number(f"{model} {name}", part, columns[f"{part}_ms"], row[f"{part}_ms"])
                for part in _PARTS
            ]
        saved = 1 - ours[1]["dpsync_ms"] / theirs[1]["dpsync_ms"]
        found.append((f"{model}: DP.sync that FOLD3D saves, %", less * 100, saved * 100))
        by_equation, simulated = _equations(*ours, theirs[1]), _simulated(ours[1], theirs[1])
        for rows, values in (("eqs. 1-7", by_equation), ("simulated", simulated)):
            closed += [Number(f"{model}, {rows}", name, value) for name, value in values.items()]
        longer = simulated[_EQ_2] / by_equation[_EQ_2]
        found.append((f"{model}: iteration over that of eq. 2", (1.0, 1.05), longer))
    grid = Grid(
        title="ms",
        numbers=tuple(numbers),
        drawn=_PARTS,
        is_stacked=True,
        axis="ms of an iteration",
    )
    beside = Grid(title="Equations, in ms and in GB of a host's activations", numbers=tuple(closed))
    return Result(
        name="fig5",
        title="Fig. 5, breakdown of two models",
        grids=(grid, beside, claims(*found)),
        notes=("the published columns of 18B are 1.11 of equation 2 as well, not 1.05 at most",),
    )


_PARTS = ("fwd", "bwd", "bubble", "dpsync", "ppsync")
_COSTS = ("fwd", "bwd", "copies")
_EQ_1, _EQ_2, _EQ_3, _EQ_5 = "Megatron (1)", "FOLD3D (2)", "bubble (3)", "exposed (5)"


def _equations(
    row: Row, ours: Mapping[str, float], theirs: Mapping[str, float]
) -> dict[str, float]:
    """Return what equations 1 to 7 make of a row of FOLD3D's, and of Megatron's DP.sync."""
    _, fit = published()
    ranks, segments = row["pp"], row["ns"]
    microbatches = row["batch"] // row["dp"] // MICROBATCH_SIZE
    shape = SHAPES[shape_name(row["model"])]
    message = layer_bytes(shape, Setup(microbatch_size=MICROBATCH_SIZE), "full")
    of_segment = message * shape.num_layers / (ranks * segments)
    compute_s = (ours["fwd_ms"] + ours["bwd_ms"]) / 1e3
    sent_s = p2p_s(2 * microbatches * segments, message, fit.sync_bytes_per_s[row["cluster"]])
    sync_s = theirs["dpsync_ms"] / 1e3
    bubbles_s = bubble_s(compute_s, ranks, segments, microbatches)
    overlap_s = overlapping_s(sent_s, sync_s, segments, microbatches)
    alone_s = exposed_s(sent_s, sync_s, 0.0, segments, microbatches)
    seconds = {
        _EQ_1: serialized_s(compute_s, sent_s + sync_s, bubbles_s),
        _EQ_2: overlapped_s(compute_s, overlap_s, alone_s, bubbles_s),
        _EQ_3: bubbles_s,
        "overlapping (4)": overlap_s,
        _EQ_5: alone_s,
    }
    held_bytes = {
        "Megatron GB (6)": interleaved_activation_bytes(ranks, segments, of_segment),
        "FOLD3D GB (7)": aiao_activation_bytes(segments, microbatches, of_segment),
    }
    in_ms = {name: value * 1e3 for name, value in seconds.items()}
    return in_ms | {name: value / 1e9 for name, value in held_bytes.items()}


def _simulated(ours: Mapping[str, float], theirs: Mapping[str, float]) -> dict[str, float]:
    """Return what is simulated of the same."""
    return {
        _EQ_1: theirs["iteration_ms"],
        _EQ_2: ours["iteration_ms"],
        _EQ_3: ours["bubble_ms"],
        _EQ_5: ours["dpsync_ms"] + ours["ppsync_ms"],
    }
