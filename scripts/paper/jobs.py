"""Run an experiment on a cluster: sbatch files for its systems, and its result from their logs.

An experiment asks for the times of points by system. Asked without any, it tells what it needs:
one task each, in a job array per allocation. Asked again with what the tasks measured, it is the
experiment's result. Each task has its own log, trace and checkpoints.
"""

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from megatron.fold3d.commands.training_flags import layout_of
from megatron.fold3d.observe.breakdown import measured
from megatron.fold3d.observe.exposure import Exposure
from megatron.fold3d.observe.trace_files import pipeline, read_ranks
from megatron.fold3d.observe.trace_timeline import to_timeline
from megatron.fold3d.observe.training_log import parse
from megatron.fold3d.predict.cost_model.layers import layers_of_stages
from megatron.fold3d.predict.cost_model.model_shape import model_shape
from scripts.paper.points import Point, Times
from scripts.paper.results import Grid, Number, Result
from scripts.paper.simulated import usable_share
from scripts.paper.systems import SYSTEMS

ROOT = Path(__file__).parents[2]
_SLURM = Path("scripts/slurm")
_INDEX = "tasks.json"
_ITERATIONS = 20
_WARMUP = 10  # iterations; `auto` tries its choices in the first nine
Experiment = Callable[[Times], Result]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A training run: a task of the job array of its allocation.

    Attributes:
        point: what is trained.
        system: by which.
        number: in its array.
    """

    point: Point
    system: str
    number: int

    @property
    def array(self) -> str:
        """The name of its allocation."""
        return f"{self.point.node}x{self.point.gpus}"

    def log(self, folder: Path) -> Path:
        """Return where its log is."""
        return folder / self.array / f"{self.number}.out"

    def words(self, folder: Path) -> list[str]:
        """Return the words of its sbatch file in `scripts/slurm`."""
        own, point = folder.resolve() / self.array / str(self.number), self.point
        flags = {
            "--train-iters": _ITERATIONS,
            "--save": own / "saved",
            "--trace": own / "trace",
            "--trace-iterations": f"{_ITERATIONS - 1}-{_ITERATIONS}",
        }
        if point.node == "cpu":
            return [*_RECOMPUTED.split(), *_spelled(flags)]
        sizes: dict[str, object] = {
            "--global-batch-size": point.batch,
            "--vocab-size": _vocabulary(point.model),
        }
        system, layers = SYSTEMS[self.system], model_shape(point.model).num_layers
        if system.candidate:  # ZeRO-3 has its own layout
            sizes |= {
                "--pipeline-model-parallel-size": point.pp,
                "--tensor-model-parallel-size": point.tp,
            }
            segments = system.segments(point.layout)
            if layers % (point.pp * segments):
                split = layout_of(layers_of_stages(layers, point.pp, segments))
                sizes["--pipeline-model-parallel-layout"] = split
        return [point.model, *_DATA.split(), *_spelled(sizes | flags)]


_DATA = "--mock-data --tokenizer-type NullTokenizer"
_RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def _spelled(flags: dict[str, object]) -> list[str]:
    return [str(word) for flag in flags.items() for word in flag]


def _vocabulary(model: str) -> int:
    """Return the tokens of a model: GPT's are padded to those of its shape."""
    padded = model_shape(model).vocab_size
    return 50_257 if padded == 51_200 else padded


def emit(name: str, experiment: Experiment, folder: Path) -> list[str]:
    """Write an sbatch file for each allocation; returns what to tell the user, in lines.

    Raises:
        ValueError: no run gives a number of this experiment.
    """
    tasks, refused = _tasks(experiment)
    if not tasks:
        raise ValueError(f"{name} has no job that can run: {'; '.join(refused)}")
    arrays = list(dict.fromkeys(task.array for task in tasks))
    told = []
    for array in arrays:
        own = [task for task in tasks if task.array == array]
        file = folder / f"{array}.sbatch"
        (folder / array).mkdir(parents=True, exist_ok=True)
        file.write_text(_script(name, own, folder))
        told.append(f"sbatch {file}    # {len(own)} tasks")
    (folder / _INDEX).write_text(json.dumps([asdict(task) for task in tasks], indent=1) + "\n")
    return [*told, *(f"    without {reason}" for reason in refused)]


def _tasks(experiment: Experiment) -> tuple[list[Task], list[str]]:
    """Return the tasks of an experiment, and which points cannot run, with the reason."""
    asked: dict[tuple[Point, str], None] = {}  # in order, each once

    def ask(point: Point, system: str) -> None:
        asked[point, system] = None

    experiment(ask)
    tasks: list[Task] = []
    refused: dict[str, list[str]] = {}
    for point, system in asked:
        if reason := _refusal(point, system):
            refused.setdefault(f"{_described(point)}: {reason}", []).append(system)
            continue
        task = Task(point=point, system=system, number=0)
        number = sum(other.array == task.array for other in tasks)
        tasks.append(replace(task, number=number))
    return tasks, [f"{', '.join(names)} on {where}" for where, names in refused.items()]


def _refusal(point: Point, system: str) -> str | None:
    """Return why no run gives a point's time, or None."""
    if (reason := SYSTEMS[system].refusal(point.layout)) or point.node == "cpu":
        return reason
    if point.gigabits is not None:
        return "a run does not set the rate of links"
    if point.model == "bert":
        return "BERT has no mock data; give scripts/slurm yours"
    heads = model_shape(point.model).num_attention_heads
    if SYSTEMS[system].candidate and heads % point.tp:
        return f"tp={point.tp} does not divide {heads} heads"
    if (share := usable_share(point, system)) > 1:
        return f"its states and activations are {share:.1f} times what a GPU can use"
    return None


def _described(point: Point) -> str:
    layout = f"({point.dp}, {point.pp}, {point.tp})"
    cluster = f"{point.node}x{point.gpus}" + (f"-{point.gigabits:g}g" if point.gigabits else "")
    return f"{cluster} {point.model} {layout}, batch {point.batch}, {point.segments} segments"


def collect(name: str, experiment: Experiment, folder: Path) -> Result:
    """Return the result of the tasks that have run.

    Raises:
        ValueError: the folder has no tasks, or none of them has run.
    """
    try:
        rows = json.loads((folder / _INDEX).read_text())
    except OSError as error:
        raise ValueError(f"{error}; --emit {folder} writes it") from None
    tasks = [Task(**row | {"point": Point(**row["point"])}) for row in rows]
    found = {(task.point, task.system): _measured(task, folder) for task in tasks}
    missing = [
        f"{task.system} on {_described(task.point)}: no iteration after {_WARMUP} in "
        f"{task.log(folder)}; sbatch --array={task.number} {folder / task.array}.sbatch"
        for task in tasks
        if found[task.point, task.system] is None
    ]
    if len(missing) == len(tasks):
        raise ValueError(f"no job has run: {missing[0]}")
    result = experiment(lambda point, system: found.get((point, system)))
    times = Grid(title="ms of an iteration", numbers=tuple(_times(found)))
    return replace(
        result,
        name=f"{name}-measured",
        grids=(*result.grids, times),
        notes=(*result.notes, *missing),
    )


def _times(found: dict[tuple[Point, str], Exposure | None]) -> Iterator[Number]:
    for (point, system), exposed in found.items():
        if exposed:
            yield Number(_described(point), system, exposed.total_s * 1e3)


def _measured(task: Task, folder: Path) -> Exposure | None:
    """Return where a task's time went; without a trace all of it counts as forward."""
    log = task.log(folder)
    rows = parse(log.read_text()) if log.exists() else []
    times_s = [row.elapsed_ms / 1e3 for row in rows if row.number > _WARMUP]
    if not times_s:
        return None
    row = Exposure(forward_s=1.0)
    trace = folder / task.array / str(task.number) / "trace" / task.system
    if trace.exists():
        ranks = read_ranks(trace)
        row = measured(ranks, to_timeline(pipeline(ranks))).iteration
    longer = median(times_s) / row.total_s  # the log has more iterations than the trace
    return Exposure(**{part: seconds * longer for part, seconds in asdict(row).items()})


def _script(name: str, tasks: Sequence[Task], folder: Path) -> str:
    """Return a job array in the allocation of a node's own script."""
    point = tasks[0].point
    own = ROOT / _SLURM / f"{point.node}.sbatch"
    kept = [
        line
        for line in own.read_text().splitlines()
        if line.startswith("#SBATCH")
        and not any(option in line for option in ("--array", "--job-name", "--nodes"))
    ]
    nodes = 2 if point.node == "cpu" else -(-point.gpus // 8)
    cases = [
        f"    {task.number}) export SYSTEMS={task.system} SEGMENTS={task.point.segments}"
        f" && set -- {shlex.join(task.words(folder))} ;;"
        for task in tasks
    ]
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            f"# Runs of `python -m scripts.paper {name}`; run sbatch in the checkout.",
            f"#SBATCH --job-name={name}-{tasks[0].array}",
            f"#SBATCH --array=0-{len(tasks) - 1}",
            f"#SBATCH --output={folder.resolve() / tasks[0].array}/%a.out",
            f"#SBATCH --nodes={nodes}",
            *kept,
            "case $SLURM_ARRAY_TASK_ID in",
            *cases,
            "esac",
            "export SLURM_ARRAY_TASK_ID=0 # of SYSTEMS",
            f'exec bash {_SLURM}/{point.node}.sbatch "$@"',
            "",
        ]
    )
