import json
import math
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megatron.fold3d.config import gpu_settings
from scripts.paper import __main__ as command
from scripts.paper import jobs
from scripts.paper.jobs import collect, emit
from scripts.paper.points import Point
from scripts.paper.simulated import usable_share
from scripts.paper.systems import SYSTEMS
from tests.commands.traces import write_traces
from tests.distributed import run_distributed
from tests.end_to_end.test_bert import data as bert_data  # noqa: F401  # a fixture
from tests.end_to_end.test_check import _run as checked
from tests.programs import ROOT
from tests.scripts.test_slurm import SHOW_QUEUES, started

LINE = (
    " [2026-01-01 00:00:00] iteration {number:8d}/      20 | consumed samples: 8 | "
    "elapsed time per iteration (ms): {ms:.1f} | lm loss: 5.0E+00 |"
)
RUNNABLE = [name for name in command.EXPERIMENTS if name not in command.OF_NO_RUN]


def log(ms: float) -> str:
    """Twenty iterations, of which the first ten are slower, and the others vary by 9 ms."""
    times_ms = (ms * 3 if n <= 10 else ms + n - 15.5 for n in range(1, 21))
    return "\n".join(LINE.format(number=n, ms=m) for n, m in enumerate(times_ms, 1))


def tasks_of(name: str, folder: Path) -> tuple[list[dict[str, Any]], str]:
    told = "\n".join(emit(name, command.EXPERIMENTS[name], folder))
    return json.loads((folder / "tasks.json").read_text()), told


def place_of(task: dict[str, Any], folder: Path) -> Path:
    return folder / array_of(task) / str(task["number"])


def array_of(task: dict[str, Any]) -> str:
    point = task["point"]
    gpus = point["dp"] * point["pp"] * point["tp"]
    return f"{point['node']}x{gpus}" + "-bert" * (point["model"] == "bert")


def test_each_allocation_has_a_task_for_each_system_that_it_can_run(tmp_path: Path):
    tasks, told = tasks_of("ablation", tmp_path)
    systems: dict[str, list[str]] = {}
    for task in tasks:
        systems.setdefault(array_of(task), []).append(task["system"])
    on_cpus = [name for name in SYSTEMS if name != "zero3"]
    assert (systems["cpux4"], systems["testbedx4"]) == (on_cpus, on_cpus)
    assert f"bash {tmp_path}/testbedx4.sh    # 9 tasks" in told
    assert systems["a100x128"] == [*SYSTEMS]
    assert "without aiao, aiao+split, aiao+preempt on v100x64 gpt3-39b (2, 4, 8), batch 128" in told
    del systems["testbedx4"]
    for array, names in systems.items():
        assert f"sbatch {tmp_path}/{array}.sbatch    # {len(names)} tasks" in told
        text = (tmp_path / f"{array}.sbatch").read_text()
        assert re.findall(r"^#SBATCH --array=(.*)$", text, re.M) == [f"0-{len(names) - 1}"]
        assert f"#SBATCH --output={tmp_path}/{array}/%a/train.log" in text
        for number, name in enumerate(names):
            assert f"    {number}) export SYSTEMS={name} SEGMENTS=4 && set -- " in text
            assert f"--trace {tmp_path}/{array}/{number}/trace --trace-" in text
            assert f"--save {tmp_path}/{array}/{number}/saved" in text


@pytest.mark.gloo
@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(2400)  # `every`: 90 s of an idle machine
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.stress)])
def test_a_task_of_each_system_model_and_node_passes_the_check(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bert_data: list[str],  # noqa: F811
    every: bool,
):
    """Every task, once where experiments share it, is checked by `make stress` alone.

    Otherwise each system has one task checked, and each model and node, the first that fits.
    2026-11-28: all 78 can begin, with what `auto` would try; 79 s on two cores.
    """
    shares: dict[tuple[str, str, str], float] = {}

    def share_until_one_fits(point: Point, system: str) -> float:
        job = (point.model, point.node, system)
        if shares.get(job, math.inf) > 1:
            shares[job] = usable_share(point, system)
        return shares[job]

    if not every:
        monkeypatch.setattr(jobs, "usable_share", share_until_one_fits)
    found: dict[tuple[Any, ...], tuple[Path, dict[str, Any]]] = {}
    for name in RUNNABLE:
        for task in tasks_of(name, tmp_path / name)[0]:
            point, system = task["point"], task["system"]
            if point["node"] not in ("cpu", "testbed"):
                job = point.values() if every else (point["model"], point["node"])
                found.setdefault((*job, system), (tmp_path / name, task))
    if not every:
        found = one_of_each(found)
    assert {system for *_, system in found} == {*SYSTEMS}

    def check(folder: Path, task: dict[str, Any]) -> None:
        array, cluster = array_of(task), array_of(task).removesuffix("-bert")
        data = bert_data if cluster != array else []
        queues, words = _asked_for(folder, array, task["number"], data)
        many = {"zero3": "8", "fold3d": "32", "aiao+preempt": "32"}
        assert queues == many.get(task["system"], "1")
        words += ["--check", cluster]
        ((code, out, err),) = run_distributed(_checked, 1, words, queues, every)
        assert code == 0, f"{task}: {err}"
        assert out.startswith(f"can begin: {cluster.partition('x')[2]} ranks, dp=")
        assert ("is then predicted to try" in out) == (every and task["system"] == "auto")

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(check, *one) for one in found.values()]:
            done.result()


def one_of_each(found: Mapping[tuple[Any, ...], Any]) -> dict[tuple[Any, ...], Any]:
    """Keep one of each system, and one of each model and node that these leave out."""
    of_systems = {key[-1]: key for key in found}.values()
    jobs = {key[:-1] for key in of_systems}
    of_others = {key[:-1]: key for key in found if key[:-1] not in jobs}.values()
    return {key: found[key] for key in (*of_systems, *of_others)}


def _checked(words: Sequence[str], queues: str, tries: bool) -> tuple[int, str, str]:
    """Check a task where `make build-cuda` has built its library, for which a file stands in.

    What ``auto`` would try takes longer to find than all else, and other tests ask for it.
    """
    from megatron.fold3d.training import dry_run

    gpu_settings.OFFLOAD_LIBRARY = Path(__file__)
    if not tries:
        dry_run.tries = lambda run, config: ()
    program, *flags = words
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": queues}
    return checked(None, flags, environment, program.removesuffix(".py"))


def _asked_for(folder: Path, array: str, number: int, own: Sequence[str]) -> tuple[str, list[str]]:
    """Return a task's hardware queues, and its script with its words."""
    ranks = int(array.removesuffix("-bert").partition("x")[2])
    script, srun = folder / f"{array}.sbatch", folder / "bin" / "srun"
    words = started(script, own, srun, ROOT, number, ranks, SHOW_QUEUES)
    return words[-1].removesuffix(" queues"), words[words.index("python") + 1 : -1]


def test_what_ran_is_shown_in_the_experiments_own_table(tmp_path: Path):
    tasks, _ = tasks_of("fig12", tmp_path)
    for task, ms in zip(tasks, (5400, 7100, 8100), strict=False):  # of batch 256
        (place_of(task, tmp_path) / "train.log").write_text(log(ms) + "\n")
    result = collect("fig12", command.EXPERIMENTS["fig12"], tmp_path)
    rates, gains, _, times = result.grids
    found = {(n.row, n.column): n.ours for n in rates.numbers}
    assert found["batch 256", "fold3d"] == pytest.approx(120.7, abs=0.1)
    assert found["batch 256", "megatron"] == pytest.approx(120.7 * 5400 / 7100, abs=0.1)
    assert found["batch 512", "fold3d"] is None
    assert gains.numbers[0].ours == pytest.approx(7100 / 5400)
    assert gains.numbers[1].ours is None
    assert [n.ours for n in times.numbers] == [5400.0, 7100.0, 8100.0]
    assert times.numbers[0].spread == (5397.75, 5402.25)
    assert result.notes[-1] == (
        f"not ended in {tmp_path}/a100x128: 3 zero3, 4 fold3d, 5 megatron, 6 dspeed3d, 7 zero3, "
        "8 fold3d, 9 megatron, 10 dspeed3d, 11 zero3; to go on: "
        f"sbatch --array=3,4,5,6,7,8,9,10,11 {tmp_path}/a100x128.sbatch"
    )
    assert "megatron  88.3 >" not in result.text()
    assert "? > -" in result.text()


def test_a_run_that_stopped_is_named_and_not_shown(tmp_path: Path):
    tasks_of("fig14", tmp_path)
    whole, stopped = (tmp_path / "a100x128" / number / "train.log" for number in "01")
    whole.write_text(log(7100) + "\n")
    stopped.write_text("\n".join(log(5400).splitlines()[:14]) + "\n")
    result = collect("fig14", command.EXPERIMENTS["fig14"], tmp_path)
    (*_, times) = result.grids
    assert [n.column for n in times.numbers] == ["megatron"]
    assert result.notes[-1] == (
        f"not ended in {tmp_path}/a100x128: 1 fold3d (14 of 20 iterations, the first 10 not timed);"
        f" to go on: sbatch --array=1 {tmp_path}/a100x128.sbatch"
    )


@pytest.mark.parametrize(
    ("task", "flag", "value", "message"),
    [
        (0, "num_layers", 40, "0 megatron trained another model than its task: num_layers 40, not"),
        (1, "global_batch_size", 8, "1 fold3d trained another batch than its task: global_batch_"),
        (1, "seed", 7, "a100x128/1 fold3d trained another seed than a100x128/0 megatron: seed 7"),
    ],
)
def test_a_run_of_another_job_than_its_tasks_is_refused_by_name(
    tmp_path: Path, task: int, flag: str, value: int, message: str
):
    tasks_of("fig14", tmp_path)
    own = {"num_layers": 48, "global_batch_size": 256, "seed": 1234}
    for number in (0, 1):
        flags = own | ({flag: value} if number == task else {})
        listed = "".join(f"  {name} {'.' * 20} {said}\n" for name, said in flags.items())
        (tmp_path / f"a100x128/{number}/train.log").write_text(listed + log(5400) + "\n")
    with pytest.raises(ValueError, match=re.escape(message)):
        collect("fig14", command.EXPERIMENTS["fig14"], tmp_path)


@pytest.mark.processes  # matplotlib lists the system's fonts once
@pytest.mark.slow
@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")
def test_what_ran_is_drawn_as_measured_with_its_spread(tmp_path, capsys):
    tasks, _ = tasks_of("ablation", tmp_path)
    for number, task in enumerate(tasks):
        (place_of(task, tmp_path) / "train.log").write_text(log(5000 + 100 * number) + "\n")
    pictures = tmp_path / "pictures"
    words = ["ablation", "--collect", str(tmp_path), "--pictures", str(pictures)]
    assert command.main(words) == 0
    svg = (pictures / "ablation-measured.svg").read_text()
    assert f"drawn in {pictures}/ablation-measured.svg" in capsys.readouterr().out
    assert "Ablation, systems by name (measured)" in svg
    assert "(simulated)" not in svg
    assert svg.count('<g id="LineCollection_') == len(tasks)  # quartiles
    assert "5000 [4998-5002]" in svg  # of its description


def test_columns_of_a_table_come_from_the_trace_and_its_iteration_from_the_log(tmp_path: Path):
    tasks, _ = tasks_of("table2", tmp_path)
    first = tasks[0]
    own = place_of(first, tmp_path)
    (own / "train.log").write_text(log(5000.0) + "\n")
    write_traces(own / "trace")
    (grid, _) = collect("table2", command.EXPERIMENTS["table2"], tmp_path).grids
    row = {n.column: n.ours for n in grid.numbers if n.row == "A100x128 GPT-3 18B Fold3D *"}
    assert row["iteration"] == pytest.approx(5000.0)
    assert row["bwd"] == pytest.approx(2 * row["fwd"], rel=1e-3)
    columns = [row[name] for name in ("fwd", "bwd", "bubble", "dpsync", "ppsync")]
    assert sum(columns) == pytest.approx(5000.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fig5", "--emit"], "fig5 has no jobs: its bars are columns of table2"),
        (["table4", "--collect"], "table4 has no jobs: an iteration's trace has no copies"),
        (["ablation", "--collect"], "tasks.json'; --emit"),
    ],
)
def test_what_cannot_be_run_or_collected_says_why(tmp_path, capsys, words, message):
    with pytest.raises(SystemExit):
        command.main([*words, str(tmp_path)])
    assert message in capsys.readouterr().err


def test_a_folder_of_another_experiment_is_refused(tmp_path: Path):
    tasks_of("fig14", tmp_path)
    with pytest.raises(ValueError, match=r"tasks.json has other tasks, .* name another folder, or"):
        tasks_of("fig2", tmp_path)
    tasks_of("fig14", tmp_path)  # the same again
