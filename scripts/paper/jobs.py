"""Run an experiment on a cluster: scripts for its systems, and its result from what they wrote.

An experiment asks for iterations of points by system. Asked without any, it tells what it needs:
one task each, in one script per allocation. Asked again with what the tasks measured, it is the
experiment's result. Each task has a folder of its own for log, trace and checkpoints.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from megatron.fold3d.observe.breakdown import Breakdown
from megatron.fold3d.observe.exposure import Exposure
from megatron.fold3d.observe.runs import Run, check_same_job, has_ended, read_run
from megatron.fold3d.observe.training_log import Spread
from megatron.fold3d.predict.cost_model.model_shape import model_shape
from scripts.paper.job_scripts import DATA, GPUS_PER_NODE, Task, command, script
from scripts.paper.points import Iteration, Point, Times, number
from scripts.paper.results import Grid, Result
from scripts.paper.simulated import usable_share
from scripts.paper.systems import SYSTEMS

_INDEX = "tasks.json"
_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
_WARMUP = 10  # iterations
Experiment = Callable[[Times], Result]


def emit(name: str, experiment: Experiment, folder: Path) -> list[str]:
    """Write a script for each allocation; returns what to tell the user, in lines.

    Raises:
        ValueError: no run gives a number of this experiment, or the folder has other tasks.
    """
    tasks, refused = _tasks(experiment)
    if not tasks:
        raise ValueError(f"{name} has no job that can run: {'; '.join(refused)}")
    index, text = folder / _INDEX, json.dumps([asdict(task) for task in tasks], indent=1) + "\n"
    if index.exists() and index.read_text() != text:
        raise ValueError(
            f"{index} has other tasks, whose logs would be taken for {name}'s; name "
            "another folder, or remove this one"
        )
    for task in tasks:
        task.place(folder).mkdir(parents=True, exist_ok=True)
    index.write_text(text)
    told = []
    for own in _by_allocation(tasks):
        file = own[0].script(folder)
        file.write_text(script(name, own, folder))
        data = f" {DATA}" if own[0].needs_data else ""
        told.append(f"{command(file)}{data}    # {len(own)} tasks")
    return [*told, *(f"    without {reason}" for reason in refused)]


def _by_allocation(tasks: Iterable[Task]) -> list[list[Task]]:
    arrays: dict[str, list[Task]] = {}
    for task in tasks:
        arrays.setdefault(task.array, []).append(task)
    return list(arrays.values())


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
        others = sum(other.array == task.array for other in tasks)
        tasks.append(replace(task, number=others))
    return tasks, [f"{', '.join(names)} on {where}" for where, names in refused.items()]


def _refusal(point: Point, system: str) -> str | None:
    """Return why no run gives a point's time, or None."""
    if (reason := SYSTEMS[system].refusal(point.layout)) or point.on_cpu:
        return reason
    if point.gigabits is not None:
        return "a run does not set the rate of links"
    heads = model_shape(point.model).num_attention_heads
    if SYSTEMS[system].candidate and heads % point.tp:
        return f"tp={point.tp} does not divide {heads} heads"
    if (share := usable_share(point, system)) > 1:
        return f"its states and activations are {share:.2f} times what a GPU can use"
    return None


def _described(point: Point) -> str:
    layout = f"({point.dp}, {point.pp}, {point.tp})"
    cluster = f"{point.node}x{point.gpus}" + (f"-{point.gigabits:g}g" if point.gigabits else "")
    return f"{cluster} {point.model} {layout}, batch {point.batch}, {point.segments} segments"


def collect(name: str, experiment: Experiment, folder: Path) -> Result:
    """Return the result of the tasks that have run to their end.

    Raises:
        ValueError: the folder has no tasks, none has run to its end, or one trained another job.
    """
    try:
        rows = json.loads((folder / _INDEX).read_text())
    except OSError as error:
        raise ValueError(f"{error}; --emit {folder} writes it") from None
    tasks = [Task(**row | {"point": Point(**row["point"])}) for row in rows]
    runs = {task: run for task in tasks if (run := _run(task, folder))}
    _check_jobs(runs)
    found = {
        (task.point, task.system): _iteration(run)
        for task, run in runs.items()
        if has_ended(run.iterations) and run.timed
    }
    missing = list(_missing([t for t in tasks if (t.point, t.system) not in found], runs, folder))
    if not found:
        raise ValueError(f"no job has ended: {missing[0]}")
    result = experiment(lambda point, system: found.get((point, system)))
    numbers = (
        number(_described(point), system, ran, lambda seconds: seconds * 1e3)
        for (point, system), ran in found.items()
    )
    times = Grid(title="ms of an iteration [quartiles]", numbers=tuple(numbers))
    return replace(
        result,
        name=f"{name}-measured",
        grids=(*result.grids, times),
        notes=(*result.notes, *missing),
    )


def _run(task: Task, folder: Path) -> Run | None:
    """Return what a task's log and trace record, or None."""
    try:
        run = read_run(task.place(folder), f"{task.array}/{task.number} {task.system}", _WARMUP)
    except ValueError:
        return None
    return run if run.iterations else None


def _check_jobs(runs: Mapping[Task, Run]) -> None:
    """Return if each run trained the model and batch of its task, and all had one seed.

    Raises:
        ValueError: one did not.
    """
    for task, run in runs.items():
        shape, batch = asdict(model_shape(task.point.model)), str(task.point.batch)
        asked = {name: str(shape[name]) for name in _SIZES} | {"global_batch_size": batch}
        check_same_job([replace(run, name="its task", flags=asked), run])
    seeds = [{"seed": run.flags.get("seed", "")} for run in runs.values()]
    if runs:
        check_same_job([replace(r, flags=s) for r, s in zip(runs.values(), seeds, strict=True)])


def _missing(tasks: Iterable[Task], runs: Mapping[Task, Run], folder: Path) -> Iterator[str]:
    """Yield a line for each allocation with tasks to run: which, and how."""
    for own in _by_allocation(tasks):
        names = ", ".join(
            f"{task.number} {task.system}" + (f" ({_stopped(runs[task])})" if task in runs else "")
            for task in own
        )
        how = command(own[0].script(folder), own)
        yield f"not ended in {folder / own[0].array}: {names}; to go on: {how}"


def _stopped(run: Run) -> str:
    last = run.iterations[-1]
    return f"{last.number} of {last.last} iterations, the first {run.warmup} not timed"


def _iteration(run: Run) -> Iteration:
    """Return a run's iteration; without a trace all its time counts as forward."""
    spread = Spread.of([seconds * 1e3 for seconds in run.times_s])
    row = run.traced.row if run.traced else Breakdown(of_rank=(Exposure(forward_s=1.0),))
    traced = row.iteration
    longer = spread.median_ms / 1e3 / traced.total_s  # the log has more iterations than the trace
    parts = {part: seconds * longer for part, seconds in traced._asdict().items()}
    offloaded = row.offloaded_bytes
    return Iteration(
        parts=Exposure(**parts),
        quartiles_s=(spread.lower_ms / 1e3, spread.upper_ms / 1e3),
        gpu_bytes=row.device_bytes,
        host_bytes=offloaded and offloaded * GPUS_PER_NODE,
    )
