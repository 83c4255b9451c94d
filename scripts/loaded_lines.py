"""How many of this project's lines a fresh interpreter loads to train under one schedule.

    .venv/bin/python scripts/loaded_lines.py
    .venv/bin/python scripts/loaded_lines.py --offload-activations on --preemptive-comm

Counts the files of `megatron.fold3d` and `fold3d_patches` that are imported with the executor, and
when the patches of the schedule are installed. A capability that is off should not be among them.

    .venv/bin/python scripts/loaded_lines.py --called

trains four CPU ranks with deferred steps, delayed weight gradients and the distributed optimizer,
and clips. It prints the files whose functions run for one stage from its last backward to its step:
what a gradient passes. With ``--called auto`` the ranks run ``--schedule auto`` instead, and the
files are those between what is measured and the plan that is chosen: first those of the run, then
those of its search, which has a process of its own.
"""

import argparse
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ("megatron.fold3d", "fold3d_patches")
SMALL = (
    "--device cpu --num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --mock-data --tokenizer-type NullTokenizer --vocab-size 63 "
    "--num-workers 0 --micro-batch-size 1 --global-batch-size 8 --lr 1e-2 "
    "--eval-iters 0 --eval-interval 19 --pipeline-model-parallel-size 2 --segments 2 "
    "--overlap-grad-reduce --use-distributed-optimizer --overlap-param-gather --clip-grad 100 "
)
TRAINED = {
    "gradient": "--train-iters 4 --schedule aiao:step=next:share=0.5:wgrad=last@1",
    "auto": "--train-iters 12 --schedule auto",
}


def loaded_lines() -> dict[str, int]:
    """Return the lines of each module of ours that this interpreter has loaded."""
    files = {
        name: Path(module.__file__)
        for name, module in sys.modules.items()
        if name.startswith(PACKAGES) and module.__file__ is not None
    }
    return {
        name: len(path.read_text(encoding="utf-8").splitlines())
        for name, path in sorted(files.items())
        if path.suffix == ".py"
    }


def load_schedule(**options: Any) -> None:
    """Import what a run of ``aiao`` on two pipeline ranks with two segments imports."""
    import_module("megatron.fold3d.runtime.executor")
    from fold3d_patches import install_schedule
    from megatron.fold3d.config.fold3d_config import Fold3DConfig
    from megatron.fold3d.plan.choice import Choice
    from megatron.fold3d.plan.compile import Features

    config = Fold3DConfig(
        choice=Choice.plain("aiao", num_segments=2),
        features=Features(grad_sync="serial"),
        num_ranks=2,
        device="cpu",
        distributed_timeout_minutes=1,
        **options,
    )
    install_schedule(config, num_microbatches=2).close()


def watch(run: Callable[..., Any], files: set[str]) -> Callable[..., Any]:
    """Return a function that calls ``run``, and adds the files of all functions called in it."""

    def watched(*args: Any, **options: Any) -> Any:
        before = sys.getprofile()
        sys.setprofile(lambda frame, *_: files.add(frame.f_code.co_filename))
        try:
            return run(*args, **options)
        finally:
            sys.setprofile(before)

    return watched


def watch_gradient(files: set[str]) -> None:
    """Watch the last stage, from its last backward to its step."""
    from megatron.fold3d.plan.ir import Op
    from megatron.fold3d.runtime import executor

    table = executor._table

    def watched(features: Any, iteration: Any, innermost: Any) -> Any:
        program = iteration.program
        stage = max(action.stage for action in program)
        last = max(i for i, a in enumerate(program) if a.stage == stage and a.op is Op.BACKWARD)
        steps = [a for a in program if a.stage == stage and a.op is Op.STEP]
        passed = {*(a for a in program[last:] if a.stage == stage), *steps}

        def handle(handler: Any) -> Any:
            seen = watch(handler, files)
            return lambda a: (seen if iteration.trains and a in passed else handler)(a)

        return {op: handle(each) for op, each in table(features, iteration, innermost).items()}

    executor._table = watched


def watch_auto(files: set[str], of_search: set[str]) -> None:
    """Watch what chooses, from the measured times to the plan that runs from then on.

    Args:
        files: of the run.
        of_search: of the search, which runs in this process here, at once.
    """
    from megatron.fold3d.predict.search.measured_search import predictions
    from megatron.fold3d.runtime.auto_schedule import AutoSchedule
    from megatron.fold3d.training import search_process

    class WatchedSearch(search_process.SearchProcess):
        def __init__(self, **question: Any) -> None:
            self._found = watch(predictions, of_search)(**question)
            super().__init__(**question)

        def answer(self) -> Any:
            super().answer()
            return self._found

    search_process.SearchProcess = WatchedSearch  # type: ignore[misc]
    for name in ("prepare", "choose_plan"):
        setattr(AutoSchedule, name, watch(getattr(AutoSchedule, name), files))


def called_files(what: str) -> list[list[str]]:
    """Train as one of the ranks, and return the files of what rank 0 called, by process."""
    from megatron.fold3d.training.launch import train

    called: list[set[str]] = [set()] if what == "gradient" else [set(), set()]
    (watch_gradient if what == "gradient" else watch_auto)(*called)
    if code := train([*SMALL.split(), *TRAINED[what].split()], "gpt"):
        sys.exit(code)
    ours = {ROOT / package.replace(".", "/") for package in PACKAGES}
    resolved = ({Path(file).resolve() for file in files} for files in called)
    return [
        sorted(str(path.relative_to(ROOT)) for path in paths if ours & set(path.parents))
        for paths in resolved
    ]


def print_called(what: str) -> None:
    """Start the ranks, of which the first prints the files."""
    if "RANK" not in os.environ:
        ranks = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
        quiet = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(
            [*ranks, str(Path(__file__)), "--called", what],
            cwd=ROOT,
            env=quiet,
            capture_output=True,
            text=True,
            check=False,
        )
        print(done.stdout.partition("\f")[2] or done.stderr, end="")
        sys.exit(done.returncode)
    called = called_files(what)
    if os.environ["RANK"] == "0":
        print(end="\f")
        for files in called:
            print(*files, f"{len(files)} files", sep="\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Print each module's lines, and their sum in the last line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--offload-activations", choices=("off", "auto", "on"), default="off")
    parser.add_argument("--preemptive-comm", action="store_true")
    parser.add_argument("--lazy-inter-segment", action="store_true")
    parser.add_argument(
        "--called", nargs="?", choices=TRAINED, const="gradient", help="what is called instead"
    )
    options = vars(parser.parse_args(argv))
    if called := options.pop("called"):
        sys.path.insert(0, str(ROOT))
        print_called(called)
        return
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)  # Megatron's training logs to stdout
    sys.path.insert(0, str(ROOT))
    load_schedule(**options)
    lines = loaded_lines()
    for name, count in lines.items():
        print(f"{count:6,} {name}")
    print(f"{sum(lines.values()):6,} lines in {len(lines)} modules")


if __name__ == "__main__":
    main()
