import json
import re
from argparse import ArgumentParser
from pathlib import Path

import pytest

from scripts.paper import __main__ as command
from scripts.paper.jobs import ABLATION, collect, emit
from scripts.paper.systems import SYSTEMS

LINE = (
    " [2026-01-01 00:00:00] iteration {number:8d}/      20 | consumed samples: 8 | "
    "elapsed time per iteration (ms): {ms:.1f} | throughput per GPU (TFLOP/s/GPU): {rate:.1f} | "
    "lm loss: 5.0E+00 |"
)


def log(ms: float, rate: float) -> str:
    """Twenty iterations, of which the first ten are slower."""
    return "\n".join(
        LINE.format(number=n, ms=ms * (3 if n <= 10 else 1), rate=rate / (3 if n <= 10 else 1))
        for n in range(1, 21)
    )


def test_each_kind_of_node_has_a_task_for_each_system_that_it_can_run(tmp_path: Path):
    told = "\n".join(emit("ablation", tmp_path))
    index = json.loads((tmp_path / "systems.json").read_text())
    assert index["cpu"] == [name for name in SYSTEMS if name != "zero3"]
    assert not {"fold3d", "aiao+preempt"} & {*index["a100"], *index["v100"]}
    assert "without fold3d: --preemptive-comm needs a hardware queue" in told
    for node, systems in index.items():
        text = (tmp_path / f"ablation-{node}.sbatch").read_text()
        assert re.findall(r"^#SBATCH --array=(.*)$", text, re.M) == [f"0-{len(systems) - 1}"]
        assert f"#SBATCH --output={tmp_path}/{node}-%a.out" in text
        assert f"export SYSTEMS='{' '.join(systems)}'" in text
        assert f"--save {tmp_path}/{node}-saved" in text
        words = re.findall(rf"^exec bash scripts/slurm/{node}.sbatch (.*)$", text, re.M)
        assert len(words) == 1


def test_what_ran_is_shown_beside_what_is_published(tmp_path: Path):
    emit("ablation", tmp_path)
    systems = json.loads((tmp_path / "systems.json").read_text())["a100"]
    for system, ms, rate in (("megatron", 7000, 90.0), ("aiao", 5400, 117.0)):
        (tmp_path / f"a100-{systems.index(system)}.out").write_text(log(ms, rate))
    (tmp_path / f"a100-{systems.index('auto')}.out").write_text("it has just begun")
    result = collect("ablation", tmp_path)
    rates, times = result.grids
    assert [(n.row, n.ours, n.published) for n in rates.numbers] == [
        ("megatron", 90.0, ABLATION["a100"].published["megatron"]),
        ("aiao", 117.0, None),
    ]
    assert [n.ours for n in times.numbers] == [7000.0, 5400.0]
    (note,) = result.notes
    assert note.startswith("auto on a100: no iteration after 10 in")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fig12", "--emit"], "fig12 has no jobs; those of ablation can be run"),
        (["ablation", "--collect"], "systems.json'; --emit"),
    ],
)
def test_what_cannot_be_run_or_collected_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
):
    with pytest.raises(SystemExit):
        command.main([*words, str(tmp_path)])
    assert message in capsys.readouterr().err


def test_nothing_is_collected_before_a_job_has_run(tmp_path: Path):
    emit("ablation", tmp_path)
    with pytest.raises(ValueError, match="no job has run: no logs in"):
        collect("ablation", tmp_path)


def test_the_jobs_words_are_flags_of_the_training_script(parser: ArgumentParser):
    for job in ABLATION.values():
        flags = [word for word in job.words if not word.startswith("gpt3")]
        parser.parse_args(flags)
