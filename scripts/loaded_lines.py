"""How many of this project's lines a fresh interpreter loads to train under one schedule.

    .venv/bin/python scripts/loaded_lines.py

Counts the files of `megatron.fold3d` and `fold3d_patches` that are imported with the executor, and
when the patches of the schedule are installed. A capability that is off should not be among them.

`called_files` is of four ranks that train with deferred steps, delayed weight gradients and the
distributed optimizer, and clip: whose functions run for one stage from its last backward to its
step, which is what a gradient passes.
"""

import logging
import sys
import warnings
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
    "--train-iters 4 --schedule aiao:step=next:share=0.5:wgrad=last@1"
)


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


def load_schedule() -> None:
    """Import what a run of ``aiao`` on two pipeline ranks with two segments imports."""
    import_module("megatron.fold3d.runtime.executor")
    from fold3d_patches import install_schedule
    from megatron.fold3d.config.fold3d_config import Fold3DConfig
    from megatron.fold3d.plan.choice import Choice
    from megatron.fold3d.plan.compile import Job

    config = Fold3DConfig(
        job=Job(choice=Choice.plain("aiao", num_segments=2), num_ranks=2, grad_sync="serial"),
        device="cpu",
        distributed_timeout_minutes=1,
    )
    install_schedule(config, num_microbatches=2).close()


def watch_gradient(files: set[str]) -> None:
    """Watch the last stage, from its last backward to its step."""
    from megatron.fold3d.plan.ir import Op
    from megatron.fold3d.runtime import executor

    table = executor._table

    def watched(features: Any, iteration: Any) -> Any:
        program = iteration.program
        stage = max(action.stage for action in program)
        last = max(i for i, a in enumerate(program) if a.stage == stage and a.op is Op.BACKWARD)
        steps = [a for a in program if a.stage == stage and a.op is Op.STEP]
        passed = {*(a for a in program[last:] if a.stage == stage), *steps}

        def handle(handler: Any) -> Any:
            def seen(action: Any) -> None:
                before = sys.getprofile()
                if iteration.trains and action in passed:
                    sys.setprofile(lambda frame, *_: files.add(frame.f_code.co_filename))
                try:
                    handler(action)
                finally:
                    sys.setprofile(before)

            return seen

        return {op: handle(each) for op, each in table(features, iteration).items()}

    executor._table = watched


def called_files() -> list[str]:
    """Train as one of four ranks, and return the files of what this one called."""
    from megatron.fold3d.training.launch import train

    called: set[str] = set()
    watch_gradient(called)
    if code := train(SMALL.split(), "gpt"):
        sys.exit(code)
    ours = {ROOT / package.replace(".", "/") for package in PACKAGES}
    paths = (Path(file).resolve() for file in called)
    return sorted(str(path.relative_to(ROOT)) for path in paths if ours & set(path.parents))


def main() -> None:
    """Print each module's lines, and their sum in the last line."""
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)  # Megatron's training logs to stdout
    sys.path.insert(0, str(ROOT))
    load_schedule()
    lines = loaded_lines()
    for name, count in lines.items():
        print(f"{count:6,} {name}")
    print(f"{sum(lines.values()):6,} lines in {len(lines)} modules")


if __name__ == "__main__":
    main()
