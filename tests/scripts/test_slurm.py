"""The SLURM scripts: what they ask Megatron for, and a real SLURM that runs and requeues them."""

import os
import re
import shutil
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.fold3d.config.all_flags import megatron_defaults
from megatron.fold3d.config.read_config import read_config
from megatron.fold3d.predict.cost_model.model_shape import Family
from megatron.fold3d.predict.cost_model.presets import SCRIPTS as TRAINING
from megatron.fold3d.predict.cost_model.presets import preset_flags
from scripts.paper.ablation import ablation
from scripts.paper.jobs import collect, emit

ROOT = Path(__file__).parents[2]
SCRIPTS = Path("scripts/slurm")
PATH = f"{os.environ['PATH']}:/usr/sbin"  # where Debian has the daemons
ABSENT = str(ROOT / "tests/absent")  # packages that a job may lack, and starts faster without
TASKS = ("megatron-best", "auto")  # of the job array
SHOW_QUEUES = 'echo "$CUDA_DEVICE_MAX_CONNECTIONS queues"'
LOSS = re.compile(r"iteration +(\d+)/.* lm loss: (\S+)")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose outputs are the test's."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in (*TRAINING.values(), "scripts"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(Path(sys.executable).parents[1])
    return folder


# What is asked for. `srun` is one that says what it was told to run.


PAPERS = (  # Tables II and III: GPU, model, (dp, pp, tp), batch
    ("a100", "gpt3-18b", (8, 2, 8), 256),
    ("a100", "gpt3-14b", (8, 2, 8), 256),
    ("a100", "gpt3-39b", (4, 4, 8), 256),
    ("a100", "t-nlg", (8, 4, 4), 256),
    ("a100", "cpm", (4, 4, 8), 256),
    ("a100", "bert", (4, 4, 8), 256),
    ("a100", "gpt3-81b", (4, 8, 8), 256),
    ("v100", "gpt3-18b", (4, 2, 8), 128),
    ("v100", "gpt3-14b", (4, 2, 8), 128),
    ("v100", "gpt3-39b", (2, 4, 8), 128),
    ("v100", "t-nlg", (4, 4, 4), 128),
    ("v100", "cpm", (2, 4, 8), 128),
    ("v100", "bert", (2, 4, 8), 128),
)


@pytest.mark.processes
@pytest.mark.parametrize(  # each model meets both tasks, one on either GPU
    ("gpu", "model", "dp_pp_tp", "batch", "task"),
    [(*row, TASKS[number % 2]) for number, row in enumerate(PAPERS)],
)
def test_a_pair_trains_the_papers_configuration(
    parser: ArgumentParser, checkout: Path, monkeypatch, gpu, model, dp_pp_tp, batch, task
):
    _has_gpu(monkeypatch, major={"a100": 8, "v100": 7}[gpu])
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as ranks.sh does, for Megatron
    text = (ROOT / SCRIPTS / f"{gpu}.sbatch").read_text()
    num_nodes, per_node = (
        int(re.findall(rf"^#SBATCH --{option}=(\d+)$", text, re.M)[0])
        for option in ("nodes", "ntasks-per-node")
    )
    num_ranks = num_nodes * per_node * (2 if model == "gpt3-81b" else 1)
    words = _asked_for(checkout, f"{gpu}.sbatch", [model, "--mock-data"], task, ranks=num_ranks)
    args = _validated(parser, words, num_ranks)

    dp, pp, tp = dp_pp_tp
    assert (args.data_parallel_size, args.pipeline_model_parallel_size) == (dp, pp)
    assert (args.tensor_model_parallel_size, args.global_batch_size) == (tp, batch)
    config = read_config(args)
    schedule = {"megatron-best": "stock", "auto": "auto"}[task]
    assert (config.choice.order, config.num_segments) == (schedule, 3 if model == "bert" else 4)
    num_microbatches = batch // (args.micro_batch_size * dp)
    assert args.microbatch_group_size_per_vp_stage == num_microbatches
    assert args.exit_signal_handler
    assert args.load == args.save == f"out/slurm/7/{task}"


@pytest.mark.processes
def test_flags_of_the_user_win(parser: ArgumentParser, checkout: Path):
    words = _asked_for(checkout, "a100.sbatch", ["gpt3-39b", "--load", "x", "--lr", "1"])
    args = parser.parse_args(words)
    assert (args.load, args.lr) == ("x", 1.0)


@pytest.mark.processes
@pytest.mark.parametrize("task", TASKS)
def test_tasks_write_to_folders_of_their_own(parser: ArgumentParser, checkout: Path, task: str):
    flags = f"gpt3-39b --trace {checkout}/t --save={checkout}/s --tensorboard-dir {checkout}/b"
    args = parser.parse_args(_asked_for(checkout, "a100.sbatch", flags.split(), task))
    assert str(args.trace) == f"{checkout}/t/{task}"
    assert args.save == args.load == f"{checkout}/s/{task}"  # a requeued job resumes from there
    assert args.tensorboard_dir == f"{checkout}/b/{task}"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("script", "flags", "queues"),
    [
        ("a100.sbatch", ["gpt3-18b"], "1"),  # its layout has tensor parallelism
        ("a100.sbatch", ["gpt3-18b", "--preemptive-comm"], "32"),
        ("a100.sbatch", ["gpt3-18b", "--use-torch-fsdp2", "--lr", "1"], "8"),
        ("cpu.sbatch", [], "32"),
        ("cpu.sbatch", ["--context-parallel-size=2"], "1"),
    ],
)
def test_a_run_has_the_hardware_queues_that_its_flags_need(checkout, script, flags, queues):
    words = _asked_for(checkout, script, flags, srun_then=SHOW_QUEUES)
    assert words[-1] == f"{queues} queues"


@pytest.mark.processes
@pytest.mark.parametrize("offloads", [False, True])
def test_what_is_offloaded_on_v100_is_not_split_over_ranks(checkout: Path, offloads: bool):
    flags = ["--offload-activations", "auto"] if offloads else []
    words = _asked_for(checkout, "v100.sbatch", ["gpt3-18b", *flags])
    assert ("--distribute-saved-activations" in words) != offloads


MODELS = ("gpt3-14b", "gpt3-18b", "gpt3-39b", "gpt3-81b", "t-nlg", "cpm")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        ("a100.sbatch", [], f"name a model: {', '.join(MODELS)} or bert"),
        ("a100.sbatch", ["t5"], f"error: t5 is none of {', '.join(MODELS)} and bert"),
        ("v100.sbatch", ["gpt3-81b"], "error: 64 V100 hold one replica of gpt3-81b at most, "),
        ("a100.sbatch", ["gpt3-18b"], "no pretrain_gpt.py in {}; run sbatch in the checkout"),
    ],
)
def test_a_job_that_cannot_run_is_refused_in_a_line(checkout, script, words, message):
    if "{}" in message:
        (checkout / "pretrain_gpt.py").unlink()
    with pytest.raises(subprocess.CalledProcessError) as caught:
        _asked_for(checkout, script, words)
    (line,) = caught.value.stderr.splitlines()
    assert message.format(checkout) in line


@pytest.mark.processes
def test_the_job_fails_as_its_ranks_do(checkout: Path):
    with pytest.raises(subprocess.CalledProcessError) as caught:
        _asked_for(checkout, "a100.sbatch", ["gpt3-18b"], srun_then="exit 5")
    assert caught.value.returncode == 5


@pytest.mark.processes
def test_arms_train_in_turns_and_what_has_finished_is_not_run_again(checkout: Path):
    folder = checkout / "out/compare/7"
    log = "".join(
        f" iteration {n:8d}/      14 | elapsed time per iteration (ms): 10{n}.0 |\n"
        for n in range(1, 15)
    )
    (checkout.parent / "train.log").write_text(log)
    for number, arm in enumerate(("yours", "auto"), 1):
        (folder / f"{number}-{arm}/round-1").mkdir(parents=True)
        (folder / f"{number}-{arm}/round-2").mkdir()
        (folder / f"{number}-{arm}/flags").write_text(f"--arm\n{arm}\n")
    (folder / "resume").write_text("sbatch again\n")
    (folder / "1-yours/round-1/train.log").write_text(log)
    train = f"case $* in *auto*round-2*) exit 1 ;; esac; cat {checkout.parent}/train.log"

    said = _started(checkout, "compare.sbatch", ["--mock-data"], srun_then=train)
    turns = ["2-auto round-1", "1-yours round-2", "2-auto round-2"]
    assert [
        line.partition(" ")[2] for line in said if line.endswith(("round-1", "round-2"))
    ] == turns
    part = Path("out/compare/7/2-auto/round-2/train.part")
    assert f"2-auto round-2 failed; see {part}" in said
    assert (checkout / part).read_text().splitlines()[-4:-2] == ["--arm", "auto"]
    assert "No difference shown between B auto and A yours" in "\n".join(said)

    said = _started(
        checkout, "compare.sbatch", ["--mock-data"], srun_then=f"cat {checkout.parent}/train.log"
    )
    assert [line.partition(" ")[2] for line in said if line.endswith("round-2")] == turns[-1:]


def _asked_for(
    checkout: Path, script: str, words: Sequence[str], *task: str, **options: Any
) -> list[str]:
    """Return the flags that a task of the job array hands to the training script."""
    shown = _started(checkout, script, words, *task, **options)
    return shown[shown.index(TRAINING[_family(words)]) + 1 :]


def _started(
    checkout: Path,
    script: str,
    words: Sequence[str],
    task: str = "auto",
    srun_then: str = "",
    ranks: int = 128,
) -> list[str]:
    """Return what a script prints that a job array's task runs in a checkout."""
    srun, number = checkout.parent / "bin" / "srun", TASKS.index(task)
    return started(SCRIPTS / script, words, srun, checkout, number, ranks, srun_then)


def started(
    script: Path,
    words: Sequence[str],
    srun: Path,
    cwd: Path,
    task: int,
    ranks: int,
    srun_then: str = "",
) -> list[str]:
    """Return what a script prints with an `srun` that prints its words, and then does more."""
    srun.parent.mkdir(exist_ok=True)
    srun.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@"\n{srun_then}\n')
    srun.chmod(0o755)
    environment = {
        "PATH": f"{srun.parent}:{PATH}",
        "SLURM_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": str(task),
        "SLURM_NTASKS": str(ranks),
        "SLURM_NTASKS_PER_NODE": "8",
    }
    return subprocess.run(
        ["bash", script, *words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    ).stdout.splitlines()


def _family(words: Sequence[str]) -> Family:
    return "bert" if "bert" in words else "gpt"


def _has_gpu(monkeypatch: pytest.MonkeyPatch, major: int) -> None:
    """Let Megatron's validation find a GPU of this compute capability."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (major, 0))
    properties = SimpleNamespace(major=major)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _device: properties)


def _validated(parser: ArgumentParser, words: Sequence[str], num_ranks: int) -> Namespace:
    """What Megatron makes of the words on the first of its ranks."""
    from megatron.training.arguments import validate_args

    preset = parser.parse_args(words).model_preset
    args = parser.parse_args([*preset_flags(preset, _family(words)), *words])
    args.rank, args.world_size = 0, num_ranks
    validate_args(args, megatron_defaults(args))
    return args


# A real SLURM.


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cluster of two nodes on this machine; yields the folder of its logs."""
    monkeypatch.setenv("PATH", PATH)
    if missing := [name for name in ("munged", "slurmctld", "slurmd") if not shutil.which(name)]:
        pytest.skip(f"no {', '.join(missing)}: needs the Debian packages slurm-wlm and munge")
    folder = tmp_path / "cluster"
    try:
        _run(ROOT / SCRIPTS / "local_cluster.sh", "start", folder, "2")
    except AssertionError as error:
        pytest.skip(f"Debian's SLURM does not start here: {error}")
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    monkeypatch.setenv("PYTHONPATH", ABSENT)
    try:
        yield folder
    finally:
        _run(ROOT / SCRIPTS / "local_cluster.sh", "stop", folder)


@pytest.mark.processes
@pytest.mark.timeout(900)  # 60 s of an idle machine with two cores
def test_a_job_that_is_requeued_twice_ends_with_the_losses_of_one_that_is_not(
    slurm: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(checkout)
    # One task per node: half the ranks to start, and the pair runs side by side.
    command = ("sbatch", "--parsable", "--ntasks-per-node=1", SCRIPTS / "cpu.sbatch")
    job = _run(*command, "--train-iters", "30")
    stock, aiao = (Path(f"slurm-{job}_{task}.out") for task in (0, 1))

    _wait_for("iteration        3/", stock)
    _run("scontrol", "requeue", f"{job}_0")
    _wait_for("exiting program after receiving SIGTERM", stock)
    seen = max(_losses(stock))
    _wait_for(f"iteration {seen + 3:8}/", stock)
    _run("scancel", "--batch", "--signal=USR1", f"{job}_0")  # as before the time limit
    _wait_for("exiting program after receiving SIGTERM", stock, times=2)
    _wait_for("successfully saved checkpoint from iteration      30", stock)
    _wait_for("successfully saved checkpoint from iteration      30", aiao)

    loaded = r"successfully loaded checkpoint .* at iteration (\d+)"
    first, second = (int(number) for number in re.findall(loaded, stock.read_text()))
    assert 3 <= first < second < 30
    ours, theirs = _losses(stock), _losses(aiao)
    assert list(ours) == list(theirs) == list(range(1, 31))
    for restart in (first, second):
        # In the second line after a start Megatron logs the mean of the first two iterations.
        del ours[restart + 2], theirs[restart + 2]
    assert ours == theirs


JOB = """--device cpu --model-preset 4-32-4-16 --attention-dropout 0 --hidden-dropout 0
    --pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 4
    --mock-data --tokenizer-type NullTokenizer --vocab-size 63 --lr 1e-3
    --eval-iters 0 --eval-interval 1000 --log-interval 1 --train-iters 30"""
ARMS = ("1-yours", "2-stock-same-layout", "3-search", "4-auto")


@pytest.mark.stress
@pytest.mark.processes
@pytest.mark.timeout(900)  # 60 s of an idle machine with two cores
def test_a_users_own_job_trains_in_four_arms_and_goes_on_where_it_was_stopped(
    slurm: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(checkout)
    monkeypatch.setenv("CLUSTER", "testbedx2")
    monkeypatch.setenv("ROUNDS", "1")
    script = SCRIPTS / "compare.sbatch"
    options = ("--parsable", "--nodes=2", "--ntasks-per-node=1", "--time=30")
    job = _run("sbatch", *options, script, *JOB.split())
    folder, out = Path("out/compare", job), Path(f"slurm-{job}.out")

    _wait_for("2-stock-same-layout round-1", out)  # the first arm's first round has finished
    first = folder / "1-yours/round-1/train.log"
    finished_at = first.stat().st_mtime
    _run("scancel", "--batch", "--signal=USR1", job)  # as before the time limit
    _wait_for("(bootstrap)", out)
    assert first.stat().st_mtime == finished_at
    text = out.read_text()
    starts = re.findall(r"(\d-[\w-]+) round-1$", text, re.M)
    assert (list(dict.fromkeys(starts)), starts.count("1-yours")) == (list(ARMS), 1)
    verdict = r"^(D auto is .*(faster|slower) than|No difference shown between D auto and)"
    assert re.search(f"{verdict} B stock, same layout", text, re.M)
    assert "host GiB" in text
    assert f"losses     {folder}/losses.svg" in text
    assert (folder / "resume").read_text() == (
        f"COMPARE={folder} sbatch --nodes=2 --ntasks-per-node=1 {script} pretrain_gpt.py\n"
    )


@pytest.mark.stress
@pytest.mark.processes
@pytest.mark.timeout(900)  # 60 s of an idle machine with two cores
def test_an_ablation_is_collected_from_a_cluster(slurm, checkout, monkeypatch):
    monkeypatch.chdir(checkout)
    folder = Path("out/ablation")
    told = emit("ablation", ablation, folder)
    assert f"sbatch {folder}/cpux4.sbatch    # 9 tasks" in told
    _run("sbatch", "--array=0,7", folder / "cpux4.sbatch")
    for task in ("0", "7"):
        log = folder / "cpux4" / task / "train.log"
        _wait_for("successfully saved checkpoint from iteration      40", log)
    result = collect("ablation", ablation, folder)
    gains, times = (grid for grid in result.grids if grid.columns)
    ours = gains.at("fold3d", "CPU")
    (milliseconds,) = (n for n in times.numbers if n.column == "fold3d")
    for number in (ours, milliseconds):
        assert number is not None
        assert number.spread is not None
        assert number.spread[0] <= number.ours <= number.spread[1]
    assert gains.at("megatron", "CPU").ours == 1
    assert gains.columns == ["CPU"]
    missing = "1 megatron-best, 2 dspeed3d, 3 aiao, 4 aiao+split, 5 aiao+offload, 6 aiao+preempt"
    assert any(f"cpux4: {missing}, 8 auto; to go on: sbatch" in note for note in result.notes)


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


def _losses(log: Path) -> dict[int, str]:
    """Return the loss of each iteration, in the order of the log; none may be there twice."""
    found = LOSS.findall(log.read_text())
    assert len(found) == len({iteration for iteration, _ in found})
    return {int(iteration): loss for iteration, loss in found}


def _wait_for(text: str, log: Path, times: int = 1, timeout_s: float = 400) -> None:
    deadline = time.monotonic() + timeout_s
    while not log.exists() or log.read_text().count(text) < times:
        if time.monotonic() > deadline:
            lines = log.read_text().splitlines() if log.exists() else [_run("squeue")]
            raise AssertionError(f"no {text!r} in {log}:\n" + "\n".join(lines[-40:]))
        time.sleep(0.1)
