"""Run an experiment on a cluster: sbatch files for its systems, and a result from their logs.

Each file is a job array, a task per system, in the allocation that `scripts/slurm` has for its kind
of node. Logs and checkpoints are in folders of their own.
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from megatron.fold3d.observe.training_log import parse
from scripts.paper.results import Grid, Number, Published, Result
from scripts.paper.systems import SYSTEMS, Layout

ROOT = Path(__file__).parents[2]
_SLURM = Path("scripts/slurm")
_INDEX = "systems.json"
_ITERATIONS = 20
_WARMUP = 10  # iterations; `auto` tries its choices in the first nine


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one kind of node trains.

    Attributes:
        layout: which systems it rules out.
        words: of its script in `scripts/slurm`.
        published: TFLOP/s per GPU of systems that the paper has.
    """

    layout: Layout
    words: tuple[str, ...]
    published: dict[str, Published]


_DATA = "--mock-data --tokenizer-type NullTokenizer"
_39B = ("gpt3-39b", *_DATA.split(), "--vocab-size", "50257")
_RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
ABLATION = {
    "a100": Job(
        layout=Layout(pipeline_ranks=4, segments=4, microbatches=16, one_queue=True),
        words=_39B,
        published={"megatron": 88.3, "dspeed3d": 78.3},
    ),
    "v100": Job(
        layout=Layout(pipeline_ranks=4, segments=4, microbatches=16, one_queue=True, fp16=True),
        words=_39B,
        published={"megatron": 41.2},
    ),
    "cpu": Job(
        layout=Layout(pipeline_ranks=2, segments=4, microbatches=4, on_cpu=True),
        words=tuple(_RECOMPUTED.split()),
        published={},
    ),
}
EMITTED = {"ablation": ABLATION}


def emit(name: str, folder: Path) -> list[str]:
    """Write an sbatch file for each kind of node; returns what to tell the user, in lines.

    Raises:
        ValueError: the experiment has no jobs.
    """
    jobs = _jobs(name)
    folder.mkdir(parents=True, exist_ok=True)
    index, told = {}, []
    for node, job in jobs.items():
        refused = {n: why for n, s in SYSTEMS.items() if (why := s.refusal(job.layout))}
        index[node] = [system for system in SYSTEMS if system not in refused]
        file = folder / f"{name}-{node}.sbatch"
        file.write_text(_script(name, node, job, index[node], folder))
        told.append(f"sbatch {file}    # {len(index[node])} systems")
        told += [f"    without {system}: {why}" for system, why in refused.items()]
    (folder / _INDEX).write_text(json.dumps(index, indent=1) + "\n")
    return told


def collect(name: str, folder: Path) -> Result:
    """Return the result of the jobs that have run.

    Raises:
        ValueError: the folder has no jobs of this experiment, or none of them has run.
    """
    jobs = _jobs(name)
    try:
        index = json.loads((folder / _INDEX).read_text())
    except OSError as error:
        raise ValueError(f"{error}; --emit {folder} writes it") from None
    times, rates, missing = [], [], []
    for node, systems in index.items():
        for task, system in enumerate(systems):
            log = folder / f"{node}-{task}.out"
            if not log.exists():
                continue
            lines = [line for line in parse(log.read_text()) if line.number > _WARMUP]
            if not lines:
                missing.append(f"{system} on {node}: no iteration after {_WARMUP} in {log}")
                continue
            times.append(Number(system, node, median(line.elapsed_ms for line in lines)))
            if node != "cpu" and (tflops := [n for line in lines if (n := line.tflops)]):
                known = jobs[node].published.get(system)
                rates.append(Number(system, node, median(tflops), known))
    if not times:
        reasons = "; ".join(missing) or f"no logs in {folder}"
        raise ValueError(f"no job has run: {reasons}")
    grids = [
        Grid(title=title, numbers=tuple(numbers), drawn=tuple({n.column: 0 for n in numbers}))
        for title, numbers in (("TFLOP/s of a GPU", rates), ("ms of an iteration", times))
        if numbers
    ]
    return Result(
        name=f"{name}-measured",
        title=f"{name.capitalize()}, systems by name",
        grids=tuple(grids),
        notes=tuple(missing),
    )


def _jobs(name: str) -> dict[str, Job]:
    if name not in EMITTED:
        raise ValueError(f"{name} has no jobs; those of {', '.join(EMITTED)} can be run")
    return EMITTED[name]


def _script(name: str, node: str, job: Job, systems: Sequence[str], folder: Path) -> str:
    """Return a job array in the allocation of a node's own script."""
    own = ROOT / _SLURM / f"{node}.sbatch"
    kept = [
        line
        for line in own.read_text().splitlines()
        if line.startswith("#SBATCH") and "--array" not in line and "--job-name" not in line
    ]
    place = folder.resolve()
    words = [*job.words, "--train-iters", str(_ITERATIONS), "--save", str(place / f"{node}-saved")]
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            f"# The systems of `python -m scripts.paper {name}`; run sbatch in the checkout.",
            f"#SBATCH --job-name={name}-{node}",
            f"#SBATCH --array=0-{len(systems) - 1}",
            f"#SBATCH --output={place}/{node}-%a.out",
            *kept,
            f"export SYSTEMS={shlex.quote(' '.join(systems))}",
            f"exec bash {_SLURM}/{node}.sbatch {shlex.join(words)}",
            "",
        ]
    )
