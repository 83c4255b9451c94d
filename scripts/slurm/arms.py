"""Write the arms that ``compare.sbatch`` trains: a user's job as it is, and what may beat it.

    python -m scripts.slurm.arms out/compare/7 pretrain_gpt.py -- --num-layers 24 ...

An arm is a folder with its flags, one word a line, and a folder for each of its rounds. `yours` has
the user's flags; `stock-same-layout` is the fastest of stock in their layout, which ``--check``
names too; `stock-any-layout` and `search` are what `fold3d search` finds and proposes; `auto` has
the chunks of `stock-same-layout` and ``--schedule auto``.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.fold3d.commands.job import codes_of
from megatron.fold3d.commands.megatron_flags import described
from megatron.fold3d.commands.search_lines import gains_over_yours
from megatron.fold3d.commands.training_flags import training_flags, without
from megatron.fold3d.commands.yours import yours
from megatron.fold3d.plan.schedule_word import AUTO
from megatron.fold3d.predict.cost_model.cluster import Cluster, cluster
from megatron.fold3d.predict.cost_model.presets import SCRIPTS, preset_flags
from megatron.fold3d.predict.search.candidates import Candidate
from megatron.fold3d.predict.search.planner import search

ROUNDS = 3
_FEWEST_ITERATIONS = 30
_OURS = ("schedule",)
_OWN_FOLDERS = ("save", "load", "save-interval", "trace", "trace-iterations", "tensorboard-dir")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the arms' folders, and say which arms there are."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.slurm.arms", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("script")
    parser.add_argument("flags", nargs="+")
    args = parser.parse_args(argv)
    try:
        found, notes = arms(args.flags, args.script, _allocated(os.environ))
    except ValueError as error:
        parser.error(str(error))
    for number, (name, words) in enumerate(found.items(), 1):
        arm = args.folder / f"{number}-{name}"
        for round_ in range(1, int(os.environ.get("ROUNDS", ROUNDS)) + 1):
            (arm / f"round-{round_}").mkdir(parents=True, exist_ok=True)
        (arm / "flags").write_text("\n".join(words) + "\n")
        print(f"{arm.name}: {shlex.join(words)}")
    notes.append(f"next, when they have trained: fold3d compare {shlex.quote(str(args.folder))}")
    print("\n".join(notes), flush=True)
    (args.folder / "resume").write_text(_resume(args.folder, args.script, os.environ) + "\n")
    return 0


def arms(
    flags: Sequence[str], script: str, hardware: Cluster
) -> tuple[dict[str, list[str]], list[str]]:
    """Return the flags of each arm, and why one is missing.

    Raises:
        ValueError: the flags are no job that arms can differ from.
    """
    words = list(without(flags, _OWN_FOLDERS))
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--train-iters", type=int)
    own.add_argument("--model-preset")
    args, _ = own.parse_known_args(words)
    if given := [f"--{name}" for name in _OURS if list(without(words, [name])) != words]:
        raise ValueError(f"{given[0]}: arms differ in it; give the flags of a job of stock")
    if args.train_iters is None or args.train_iters < _FEWEST_ITERATIONS:
        raise ValueError(
            f"--train-iters {args.train_iters}: auto chooses in the first of them; give 50"
        )
    last_two = f"{args.train_iters - 1}-{args.train_iters}"
    traced = ["--trace-iterations", last_two]
    found = {"yours": [*words, *traced]}
    if args.model_preset:
        family = next(family for family, name in SCRIPTS.items() if name == script)
        words = [*preset_flags(args.model_preset, family), *without(words, ["model-preset"])]

    def arm(candidate: Candidate) -> list[str]:
        fp16 = said.args.fp16
        chosen = training_flags(said.model(), hardware, candidate, fp16=fp16, own=words)
        return [*shlex.split(chosen), *traced]

    said = described(words)
    mine, remarks = yours(said, hardware)
    batch = said.args.global_batch_size
    fixed, codes = said.given(hardware), codes_of(said.args, hardware)
    free = search(said.model(), hardware, global_batch_size=batch, given=fixed, codes=codes)
    notes = [*remarks, *(gains_over_yours(free, mine) if mine else ())]
    stock, anywhere = mine.same_layout if mine else None, free.best_stock
    if stock is None:
        notes.append("no stock-same-layout and no auto: no stock configuration of this layout fits")
    else:
        found["stock-same-layout"] = arm(stock.candidate)
    if anywhere and (stock is None or anywhere.candidate.layout != stock.candidate.layout):
        found["stock-any-layout"] = arm(anywhere.candidate)
    if free.choice.candidate.is_ours:
        found["search"] = arm(free.choice.candidate)
    if stock is not None:
        found["auto"] = arm(stock.candidate.with_options(order=AUTO))
    return found, notes


def _allocated(environment: Mapping[str, str]) -> Cluster:
    """Return the cluster that CLUSTER names, which must be the allocation.

    Raises:
        ValueError: there is none, or its GPUs are not those of the tasks.
    """
    if not (name := environment.get("CLUSTER")):
        raise ValueError("no CLUSTER: name the nodes as for `fold3d search`, CLUSTER=a100x64-200g")
    found, tasks = cluster(name), int(environment["SLURM_NTASKS"])
    if found.num_gpus != tasks:
        raise ValueError(
            f"CLUSTER={name} has {found.num_gpus} GPUs, and the job {tasks} tasks; name as many"
        )
    return found


def _resume(folder: Path, script: str, environment: Mapping[str, str]) -> str:
    """Return the command that runs what is missing in a folder, in an allocation like this one."""
    options = {
        "--nodes": "SLURM_JOB_NUM_NODES",
        "--ntasks-per-node": "SLURM_NTASKS_PER_NODE",
        "--gpus-per-node": "SLURM_GPUS_PER_NODE",
    }
    given = [
        f"{option}={environment[name]}" for option, name in options.items() if name in environment
    ]
    words = ["sbatch", *given, "scripts/slurm/compare.sbatch", script]
    return f"COMPARE={shlex.quote(str(folder))} {shlex.join(words)}"


if __name__ == "__main__":
    sys.exit(main())
