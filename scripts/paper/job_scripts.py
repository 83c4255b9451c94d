"""The scripts that run an experiment's tasks: a SLURM job array, or a loop on the testbed."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.fold3d.commands.training_flags import layout_of
from megatron.fold3d.policy.partition import layers_of_stages
from megatron.fold3d.predict.cost_model.model_shape import model_shape
from scripts.paper import on_testbed
from scripts.paper.points import Point
from scripts.paper.systems import SYSTEMS

DATA = "--data-path DATA --tokenizer-type HuggingFaceTokenizer --tokenizer-model DIR"
"""What the user adds for a model that has no mock data."""
GPUS_PER_NODE = 8
_ROOT = Path(__file__).parents[2]
_SLURM = Path("scripts/slurm")
_MOCK_DATA = "--mock-data --tokenizer-type NullTokenizer"
_RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_ITERATIONS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A training run: a task of its allocation's script."""

    point: Point
    system: str
    number: int

    @property
    def array(self) -> str:
        """The name of its allocation, and of the data that all tasks of a script share."""
        return f"{self.point.node}x{self.point.gpus}" + ("-bert" if self.needs_data else "")

    @property
    def needs_data(self) -> bool:
        """Whether the user has to name the data."""
        return self.point.model == "bert"

    def place(self, folder: Path) -> Path:
        """Return the folder that it writes to."""
        return folder.resolve() / self.array / str(self.number)

    def script(self, folder: Path) -> Path:
        """Return the file that runs it."""
        suffix = ".sh" if self.point.node == "testbed" else ".sbatch"
        return folder / f"{self.array}{suffix}"

    def own_flags(self, folder: Path) -> list[str]:
        """Return the flags that only this task has, but for its system's."""
        place, last = self.place(folder), f"{_ITERATIONS - 1}-{_ITERATIONS}"
        return ["--trace", str(place / "trace"), "--trace-iterations", last]


def command(file: Path, tasks: Sequence[Task] = ()) -> str:
    """Return the command that runs a script: these of its tasks, or all."""
    numbers = [str(task.number) for task in tasks]
    if file.suffix == ".sh":
        return " ".join(["bash", str(file), *numbers])
    return " ".join(["sbatch", *([f"--array={','.join(numbers)}"] if numbers else []), str(file)])


def script(name: str, tasks: Sequence[Task], folder: Path) -> str:
    """Return the script of an experiment's tasks of one allocation."""
    is_testbed = tasks[0].point.node == "testbed"
    lines = _testbed(tasks, folder) if is_testbed else _job_array(name, tasks, folder)
    what = f"# Runs of `python -m scripts.paper {name}`; start it in the checkout."
    return "\n".join(["#!/usr/bin/env bash", what, *lines, ""])


def _testbed(tasks: Sequence[Task], folder: Path) -> Iterator[str]:
    """Yield a loop over the tasks that its arguments name, by default all; one may fail alone."""
    own = shlex.quote(str(tasks[0].place(folder).parent))
    bench = f"--hosts {tasks[0].point.gpus} --rate {on_testbed.RATE} --logs {own}/$1"
    rank = f"python -m scripts.bench.rank {' '.join(on_testbed.RANK_FLAGS)}"
    yield "# As root, or under: unshare -Ur"
    yield "PATH=$PWD/.venv/bin:$PATH"
    yield "train() { # a task, and the flags of its system"
    yield f"    python -m scripts.bench.testbed {bench} -- {rank} -- \\"
    yield f'        {shlex.join(on_testbed.job(_ITERATIONS).flags())} "${{@:2}}"'
    yield "}"
    yield f"for task in ${{*:-{' '.join(str(task.number) for task in tasks)}}}; do"
    yield "    case $task in"
    for task in tasks:
        words = [*SYSTEMS[task.system].words(task.point.layout), *task.own_flags(folder)]
        yield f"        {task.number}) train {task.number} {shlex.join(words)} ;;"
    yield "    esac"
    yield "done"


def _job_array(name: str, tasks: Sequence[Task], folder: Path) -> Iterator[str]:
    """Yield a job array in the allocation of a node's own script; words of the user's win."""
    point = tasks[0].point
    yield "# A task saves its whole model; remove the folders `saved` when all have run."
    yield f"#SBATCH --job-name={name}-{tasks[0].array}"
    yield f"#SBATCH --array=0-{len(tasks) - 1}"
    yield f"#SBATCH --output={tasks[0].place(folder).parent}/%a/train.log"
    yield f"#SBATCH --nodes={2 if point.node == 'cpu' else -(-point.gpus // GPUS_PER_NODE)}"
    for line in (_ROOT / _SLURM / f"{point.node}.sbatch").read_text().splitlines():
        replaced = ("--array", "--job-name", "--nodes")
        if line.startswith("#SBATCH") and not any(option in line for option in replaced):
            yield line
    yield "case $SLURM_ARRAY_TASK_ID in"
    for task in tasks:
        variables = f"SYSTEMS={task.system} SEGMENTS={task.point.segments}"
        saved = ["--save", str(task.place(folder) / "saved")]
        words = [*_words(task), *task.own_flags(folder), *saved]
        yield f'    {task.number}) export {variables} && set -- {shlex.join(words)} "$@" ;;'
    yield "esac"
    yield "export SLURM_ARRAY_TASK_ID=0 # of SYSTEMS"
    yield f'exec bash {_SLURM}/{point.node}.sbatch "$@"'


def _words(task: Task) -> list[str]:
    """Return what a task's job differs in from that of its node's script."""
    point, sizes = task.point, {"--train-iters": _ITERATIONS}
    if point.node == "cpu":
        return [*_RECOMPUTED.split(), *_spelled(sizes)]
    words = [point.model]
    if not task.needs_data:
        words += [*_MOCK_DATA.split(), "--vocab-size", str(_vocabulary(point.model))]
    sizes["--global-batch-size"] = point.batch
    system, layers = SYSTEMS[task.system], model_shape(point.model).num_layers
    if not system.candidate:  # ZeRO-3 has its own layout
        return [*words, *_spelled(sizes)]
    sizes["--pipeline-model-parallel-size"] = point.pp
    sizes["--tensor-model-parallel-size"] = point.tp
    words += _spelled(sizes)
    segments = system.segments(point.layout)
    if layers % (point.pp * segments):
        split = layout_of(layers_of_stages(layers, point.pp, segments))
        words += ["--pipeline-model-parallel-layout", split]
    return words


def _spelled(flags: dict[str, int]) -> list[str]:
    return [str(word) for flag in flags.items() for word in flag]


def _vocabulary(model: str) -> int:
    """Return the tokens of a model: GPT's are padded to those of its shape."""
    padded = model_shape(model).vocab_size
    return 50_257 if padded == 51_200 else padded
