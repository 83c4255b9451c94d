"""Hold the planner to what others measured, from the words of their tables.

    python -m scripts.bench.foreign_rows --vtrain https://raw.githubusercontent.com/\
VIA-Research/vTrain/main/data/ground_truth_multi.csv [--each] [--svg FILE]

`tests/data/foreign_tables.json` has each table's numbers, with their source and how far to trust
it. vTrain's 109 rows are read from its own file, which is not here.

Which half is for what was decided before any row was read. A table's rows count from 1 in its own
order. Odd rows are *open*: causes of errors are looked for in them. Even rows are *held*: they are
only for the final number. vTrain's rows count within a model, the others' within a table. Of a
cluster whose rows are at several rates, the fastest is open and all others are held.
"""

import csv
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import groupby
from math import nan
from pathlib import Path
from statistics import correlation, mean
from typing import Any
from urllib.request import urlopen

from megatron.fold3d.commands.pictures import SIZE, as_bytes, figure
from megatron.fold3d.observe.report.palette import PLAIN, SERIES
from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.schedule_word import STOCK
from megatron.fold3d.policy.partition import layers_of_stages
from megatron.fold3d.predict.cost_model.cluster import Cluster, cluster
from megatron.fold3d.predict.cost_model.model_shape import ModelShape, model_shape
from megatron.fold3d.predict.cost_model.sizes import Setup
from megatron.fold3d.predict.search.candidate_timeline import timeline_of
from megatron.fold3d.predict.search.candidates import Candidate, estimate_of
from scripts.bench.options import parser_of
from scripts.bench.summary import markdown

FILE = Path(__file__).parents[2] / "tests/data/foreign_tables.json"
_MOST_TRIES, _CLOSE = 12, 1e-3  # until GPUs are as fast as measured
_FEWEST = 3  # rows that have a rank
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
_VTRAIN_SAME = {
    "gpu": "a100-80g",  # the largest micro-batches fit no smaller memory
    "gigabits": "4x200",
    "recompute": "full",
    "local": True,
    "small_gradients": True,  # as DeepSpeed sums them
    "scattered": True,
}


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
        replicas = w["gpus"] // (ranks * tensor * w.get("cp", 1))
        setup = Setup(
            tensor_parallel=tensor,
            data_parallel=replicas,
            microbatch_size=w["mbs"],
            recompute=w.get("recompute", "none"),
            sequence_parallel=w.get("sequence", False) or w.get("recompute") == "selective",
            distributed_optimizer=w.get("sharded", False),
            small_gradients=w.get("small_gradients", False),
            local_layers=w.get("local", False),
            context_parallel=w.get("cp", 1),
            expert_parallel=w.get("ep", 1),
            expert_tensor_parallel=int("ep" in w),
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
                held = words["gigabits"] < max(
                    r[table["columns"].index("gigabits")] for r in table["rows"]
                )
            shape = own.get(words["model"]) or model_shape(words["model"])
            rows.append(Row(table["name"], words, _seconds(words, shape), held, shape))
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
        rows.append(
            Row(f"vTrain {name}", _VTRAIN_SAME | words, seconds, is_held(numbers[name]), shape)
        )
    return Table("vTrain", rows)


def _slower(row: Row) -> float:
    """Return how much slower the GPUs are than the planner says, by a row's measurement."""
    slower = 1.0
    for _ in range(_MOST_TRIES):
        ratio = row.seconds / row.predict(slower)
        slower *= ratio
        if abs(ratio - 1) < _CLOSE:
            break
    return slower


def _seconds(words: Mapping[str, Any], shape: ModelShape) -> float:
    if "seconds" in words:
        return float(words["seconds"])
    return float(words["batch"] * shape.seq_length / words["tokens_per_s"] / words["gpus"])


@dataclass(frozen=True, slots=True)
class Score:
    """What predictions of some rows are worth; NaN where rows are too few."""

    errors: Sequence[float]
    rank: float
    regret: float

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> "Score":
        """Return the score of pairs of measured and predicted seconds.

        Regret is by how much the run that is predicted to be fastest is slower than the fastest.
        """
        errors = [predicted / measured - 1 for measured, predicted in pairs]
        if len(pairs) < _FEWEST:
            return cls(errors, nan, nan)
        measured, predicted = zip(*pairs, strict=True)
        chosen = measured[predicted.index(min(predicted))]
        rank = correlation(measured, predicted, method="ranked")
        return cls(errors, rank, chosen / min(measured) - 1)

    @property
    def cells(self) -> tuple[str, str, str]:
        """The number of rows, the mean and the largest error."""
        if not self.errors:
            return "0", "", ""
        sizes = [abs(error) for error in self.errors]
        return str(len(sizes)), f"{mean(sizes):.1%}", f"{max(self.errors, key=abs):+.1%}"


@dataclass(frozen=True, slots=True)
class Compared:
    """A row and what is predicted of it; not `compared` if it is what others are scaled to."""

    row: Row
    predicted: float
    compared: bool


def compare(table: Table) -> list[Compared]:
    """Predict the rows of a table; in a scaled one the first of a model are as measured."""
    found, slower = [], dict[str, float]()
    for row in table.rows:
        compared = not table.scaled or row.shape.name in slower
        if not compared:
            slower[row.shape.name] = _slower(row)
        found.append(Compared(row, row.predict(slower.get(row.shape.name, 1.0)), compared))
    return found


def _lines(found: Sequence[Compared], scaled: Set[str]) -> Iterator[tuple[str, ...]]:
    """Yield a line for each table: open rows, then held ones with rank and regret."""
    for name, rows in groupby(found, key=lambda one: one.row.table):
        of_table = [one for one in rows if one.compared]
        halves = (
            Score.of([(c.row.seconds, c.predicted) for c in of_table if c.row.held is held])
            for held in (False, True)
        )
        opened, held = halves
        ranked = name not in scaled and held.rank == held.rank
        rank = (f"{held.rank:.3f}", f"{held.regret:.1%}") if ranked else ("", "")
        yield (name, *opened.cells, *held.cells, *rank)


def draw(found: Sequence[Compared]) -> bytes:
    """Return predicted against measured seconds, open and held rows, as an SVG."""
    title = "Iterations that others measured, and what is predicted"
    with figure("--svg", 450) as picture:
        axes = picture.subplots()
        times = [s for one in found for s in (one.row.seconds, one.predicted)]
        ends = min(times) / 1.2, max(times) * 1.2
        near = [0.9 * s for s in ends], [1.1 * s for s in ends]
        axes.fill_between(ends, *near, color=PLAIN["row"])
        axes.plot(ends, ends, color=PLAIN["line"], linewidth=1)
        kinds = dict.fromkeys(one.row.table.split()[0] for one in found)
        for number, kind in enumerate(kinds):
            for held in (False, True):
                some = [c for c in found if c.compared and c.row.held is held]
                some = [c for c in some if c.row.table.startswith(kind)]
                axes.plot(
                    [c.row.seconds for c in some],
                    [c.predicted for c in some],
                    "o",
                    markersize=5,
                    color=SERIES[number],
                    markerfacecolor=SERIES[number] if held else "none",
                    label=f"{kind}, {'held' if held else 'open'}" if some else None,
                )
        picture.suptitle(title, x=0.01, ha="left", weight="bold", size=SIZE)
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set(xlabel="measured, seconds", ylabel="predicted, seconds; grey: within 10%")
        axes.legend()
        return as_bytes(picture, title)


def main() -> int:
    """Print each table's errors; returns the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("--vtrain", help="its CSV: a path, or an address that begins with https://")
    parser.add_argument("--only", default="", help="tables whose name begins with this")
    parser.add_argument("--each", action="store_true", help="also every row")
    parser.add_argument("--svg", type=Path, help="draw predicted against measured")
    args = parser.parse_args()
    all_ = [*([vtrain(args.vtrain)] if args.vtrain else []), *tables()]
    chosen = [table for table in all_ if table.name.startswith(args.only)]
    found = [one for table in chosen for one in compare(table)]
    for one in found if args.each else ():
        w, half = one.row.words, "held" if one.row.held else "open"
        sizes = " ".join(f"{key} {w[key]}" for key in ("gpus", "tp", "pp", "mbs", "batch"))
        times = f"{one.row.seconds:8.3f} {one.predicted:8.3f}"
        error = one.predicted / one.row.seconds - 1
        print(f"{one.row.table:<34} {half} {times} {error:+7.1%}  {sizes}")
    titles = ("table", "open", "mean", "worst", "held", "mean", "worst", "rank", "regret")
    scaled = {table.name for table in chosen if table.scaled}
    for line in markdown(titles, _lines(found, scaled)):
        print(line)
    of_vtrain = (c for c in found if c.row.held and c.row.table.startswith("vTrain"))
    if held := [c.predicted / c.row.seconds - 1 for c in of_vtrain]:
        print(f"vTrain, all {len(held)} held rows: mean error {mean(map(abs, held)):.1%}")
    if args.svg:
        args.svg.write_bytes(draw(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
