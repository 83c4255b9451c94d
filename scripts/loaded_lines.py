"""How many of this project's lines a fresh interpreter loads to train under one schedule.

    .venv/bin/python scripts/loaded_lines.py
    .venv/bin/python scripts/loaded_lines.py --offload-activations on --preemptive-comm

Counts the files of `megatron.fold3d` and `fold3d_patches` that are imported with the executor, and
when the patches of the schedule are installed. A capability that is off should not be among them.
"""

import argparse
import logging
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ("megatron.fold3d", "fold3d_patches")


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

    config = Fold3DConfig(
        schedule="aiao",
        plan_file=None,
        num_ranks=2,
        num_segments=2,
        aiao_last_segment="1f1b",
        device="cpu",
        microbatch_group_size=None,
        distributed_timeout_minutes=1,
        **options,
    )
    install_schedule(config, num_microbatches=2).close()


def main(argv: Sequence[str] | None = None) -> None:
    """Print each module's lines, and their sum in the last line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--offload-activations", choices=("off", "auto", "on"), default="off")
    parser.add_argument("--preemptive-comm", action="store_true")
    parser.add_argument("--backward-share", type=float)
    parser.add_argument("--delay-weight-grads", type=int, nargs="*", default=(), metavar="SEGMENT")
    parser.add_argument("--lazy-inter-segment", action="store_true")
    options = vars(parser.parse_args(argv))
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)  # Megatron's training logs to stdout
    sys.path.insert(0, str(ROOT))
    load_schedule(**options | {"delay_weight_grads": tuple(options["delay_weight_grads"])})
    lines = loaded_lines()
    for name, count in lines.items():
        print(f"{count:6,} {name}")
    print(f"{sum(lines.values()):6,} lines in {len(lines)} modules")


if __name__ == "__main__":
    main()
