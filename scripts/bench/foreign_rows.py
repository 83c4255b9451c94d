"""Hold the planner to what others measured, from the words of their tables.

    python -m scripts.bench.foreign_rows --vtrain https://raw.githubusercontent.com/\
VIA-Research/vTrain/main/data/ground_truth_multi.csv [--rows open] [--svg FILE]

`tests/data/foreign_tables.json` has each table's numbers, with their source and how far to trust
it. vTrain's 109 rows are read from its own file, which is not here.

Which half is for what was decided before any row was read. A table's rows count from 1 in its own
order. Odd rows are *open*: causes of errors are looked for in them. Even rows are *held*: they are
only for the final number. vTrain's rows count within a model, the others' within a table. Of a
cluster whose rows are at several rates, the fastest is open and all others are held.
"""

import argparse
import csv
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pathlib import Path
from statistics import correlation, mean
from typing import Any
from urllib.request import urlopen

from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.schedule_word import STOCK
from megatron.fold3d.policy.partition import layers_of_stages
from megatron.fold3d.predict.cost_model.cluster import Cluster, cluster
from megatron.fold3d.predict.cost_model.model_shape import ModelShape, model_shape
from megatron.fold3d.predict.cost_model.sizes import Setup
from megatron.fold3d.predict.search.candidate_estimate import estimate_of
from megatron.fold3d.predict.search.candidate_timeline import timeline_of
from megatron.fold3d.predict.search.candidates import Candidate
from scripts.bench.tables import markdown

FILE = Path(__file__).parents[2] / "tests/data/foreign_tables.json"
_VTRAIN = {
    "hidden": "hidden size",
    "heads": "attention heads",
    "layers": "# layers",
    "length": "sequence length",
    "gpus": "# GPUs",
    "batch": "global batch",
    "mbs": "micro batch",
    "tp": "tensor parallelism",
    "dp": "data parallelism",
    "pp": "pipeline parallelism",
}
_VTRAIN_SAME = {"gpu": "a100-80g", "gigabits": "4x200", "recompute": "full", "local": True, "small_gradients": True, "scattered": True}


def is_held(row: int) -> bool:
    """Return whether a row of a table, counted from 1, is kept out of the search for causes."""
    return row % 2 == 0


@dataclass(frozen=True, slots=True)
class Row:
    """One measured run; ``words`` are what its table says of it."""

    table: str
    words: Mapping[str, Any]
    seconds: float
    held: bool
    shape: ModelShape

    def predict(self, slower: float = 1.0) -> float:
        """Return the seconds of an iteration on GPUs that take so many times as long."""
        hardware, candidate = _hardware(self.words), self.candidate
        hardware = replace(
            hardware,
            gpu_flops_per_s=hardware.gpu_flops_per_s / slower,
            memory_bytes_per_s=hardware.memory_bytes_per_s / slower,
        )
        known = estimate_of(self.shape, hardware, candidate)
        if self.words.get("scattered"):
            sent_s = known.costs.p2p_s / candidate.setup.tensor_parallel
            known = replace(known, costs=replace(known.costs, p2p_s=sent_s))
        return timeline_of(candidate, known).period_s

    @property
    def candidate(self) -> Candidate:
        """What the planner calls the run."""
        w = self.words
        ranks, segments, tensor = w["pp"], w.get("chunks", 1), w["tp"]
        replicas = w["gpus"] // (ranks * tensor)
        setup = Setup(
            tensor_parallel=tensor,
            data_parallel=replicas,
            microbatch_size=w["mbs"],
            recompute=w.get("recompute", "none"),
            sequence_parallel=w.get("sequence", False) or w.get("recompute") == "selective",
            distributed_optimizer=w.get("sharded", False),
            small_gradients=w.get("small_gradients", False),
            local_layers=w.get("local", False),
        )
        layers = layers_of_stages(self.shape.num_layers, ranks, segments)
        return Candidate(
            choice=Choice.plain(STOCK, segments),
            setup=setup,
            num_ranks=ranks,
            num_microbatches=w["batch"] // (replicas * w["mbs"]),
            layers=layers,
        )


def _hardware(words: Mapping[str, Any]) -> Cluster:
    rate = f"-{words['gigabits']}g" if "gigabits" in words else ""
    found = cluster(f"{words['gpu']}x{words['gpus']}{rate}")
    if one := words.get("per_node"):
        found = replace(found, num_nodes=found.num_gpus // one, gpus_per_node=one)
    return replace(found, nic_latency_s=words.get("latency_s", found.nic_latency_s))


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of one source; a scaled one takes the computation of its models' first rows as given."""

    name: str
    rows: Sequence[Row]
    scaled: bool = False


def tables() -> Iterator[Table]:
    """Yield the tables of `FILE`."""
    found = json.loads(FILE.read_text(encoding="utf-8"))
    own = {name: ModelShape(name=name, **fields) for name, fields in found["models"].items()}
    for table in found["tables"]:
        rows = []
        for number, cells in enumerate(table["rows"], 1):
            words = table["same"] | dict(zip(table["columns"], cells, strict=True))
            held = is_held(number)
            if "gigabits" in table["columns"]:
                held = words["gigabits"] < max(r[table["columns"].index("gigabits")] for r in table["rows"])
            shape = own.get(words["model"]) or model_shape(words["model"])
            rows.append(Row(table["name"], words, words["seconds"], held, shape))
        yield Table(table["name"], rows, table["scaled"])


def vtrain(place: str) -> Table:
    """Return vTrain's rows, from its file at a path or an address."""
    if place.startswith("https://"):
        with urlopen(place) as answer:
            text = answer.read().decode("utf-8-sig")
    else:
        text = Path(place).read_text(encoding="utf-8-sig")
    rows, numbers = [], Counter[str]()
    for line in csv.DictReader(text.splitlines()):
        words = {key: int(line[title]) for key, title in _VTRAIN.items()}
        name = f"{line['Parameters (billion)']}B"
        numbers[name] += 1
        shape = ModelShape(
            name, words["layers"], words["hidden"], words["heads"], seq_length=words["length"]
        )
        seconds = float(line["iteration time (ms)"]) / 1e3
        rows.append(Row(f"vTrain {name}", _VTRAIN_SAME | words, seconds, is_held(numbers[name]), shape))
    return Table("vTrain", rows)


def predicted(table: Table) -> list[float]:
    """Return the seconds of each row; in a scaled table the first of a model are as measured."""
    found, slower = [], dict[str, float]()
    for row in table.rows:
        if table.scaled and row.shape.name not in slower:
            slower[row.shape.name] = _slower(row)
        found.append(row.predict(slower.get(row.shape.name, 1.0)))
    return found


def _slower(row: Row) -> float:
    """Return how much slower the GPUs are than the planner says, by a row's measurement."""
    low, high = 0.1, 10.0
    for _ in range(20):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if row.predict(middle) < row.seconds else (low, middle)
    return middle


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's: 1 if both have the same order."""
    return correlation(first, second, method="ranked")
