import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from megatron.fold3d.cli import _COMMANDS
from megatron.fold3d.commands.console import suggestion
from tests.programs import printed, ran

PLAN = "plan --schedule aiao --pp 2 --microbatches 2"
AIAO = "plan --schedule aiao --pp 2 --segments 2 --microbatches 3"
SIMULATE = "simulate --schedule aiao --pp 2 --segments 2 --microbatches 4"
SEARCH = "search --global-batch-size 64"
ON_A100 = "--model 24-2048-16 --cluster a100x8"


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """Run a shell line in which ``fold3d`` is the command."""
    script = "import sys; from megatron.fold3d.cli import main; sys.exit(main())"
    function = f'fold3d() {{ {shlex.quote(sys.executable)} -c {shlex.quote(script)} "$@"; }}'
    return ran("bash", "-c", f"{function}; {line}")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "the following arguments are required: COMMAND"),
        ("plan", "no batch: give --global-batch-size, or --microbatches in place of it"),
        (f"{PLAN} --pp two", "invalid int value: 'two'"),
        (f"{AIAO} --json --format csv", "not allowed with argument"),
        (f"{PLAN} --pp -2", "--pipeline-model-parallel-size -2: it is at least one"),
        (f"{PLAN} --pp 99999999", "no memory holds a plan of over"),
        ("serch", "no command 'serch'; did you mean search?"),
        ("frobnicate", "no command 'frobnicate'; it is one of plan, verify, simulate, search"),
        (f"{PLAN} --segmnts 2", "did you mean --segments?"),
        (f"{PLAN} --segm 2", "did you mean --segments?"),
        ("plan --sched aiao --pp 2 --microbatches 2", "--sched aiao; did you mean --schedule?"),
        ("verify", "the following arguments are required: --plan-file"),
        (
            "compare a b --num-layers 4",
            "--num-layers 4; --num-layers is a training's flag: fold3d plan, simulate and search",
        ),
        ("verify --plan-file /nowhere/plan.txt", "/nowhere/plan.txt: No such file or directory"),
        ("verify --plan-file /", "/: Is a directory"),
        ("simulate", "no batch: give --global-batch-size, or --microbatches"),
        ("simulate --schedule aiao --pp 2 -- --lr 1", "no batch: give --global-batch-size"),
        ("simulate --schedule plan=x", "x: No such file or directory"),
        (f"{SIMULATE} --segments auto --layers auto", "--segments auto: it measures the hardware"),
        (f"{SIMULATE} --seconds forward=-1", "'forward=-1': seconds are zero or more"),
        (f"{SIMULATE} --seconds p2p=nan", "'p2p=nan': seconds are zero or more"),
        (f"{SIMULATE} --seconds step=1", "'step=1': give some of forward, backward, recompute"),
        (
            f"{SIMULATE} --seconds forward=1 --costs x",
            "--costs: not allowed with argument --seconds",
        ),
        (f"{SIMULATE} --model 24-2048-16", "a model without --cluster"),
        (f"{SIMULATE} --cluster a100x8", "the command line has no model: give --model NAME"),
        (
            f"{SIMULATE} --segments 2 --pp 1 --bogus",
            "fold3d simulate: unrecognized arguments: --bogus; flags that are your script's own ",
        ),
        (f"{SIMULATE} {ON_A100} --tp 3", "take 6 GPUs for a model, and a100x8 has 8; give sizes"),
        (
            f"{SIMULATE} {ON_A100} --dp 3",
            "2 GPUs for a model x 3 replicas, and a100x8 has 8; give --dp 4",
        ),
        (
            f"{SIMULATE} --model 25-2048-16 --cluster a100x8",
            "25 layers on 2 ranks: each holds as many",
        ),
        (f"{SEARCH} --model gpt9 --cluster a100x8", "unknown model 'gpt9'; choose from"),
        (f"{SEARCH} --model gpt3-18b --cluster a100", "unknown cluster 'a100'; write <node>x"),
        (f"{SEARCH} --model gpt3-18b --cluster a100x8000000", "give 1000000 at most"),
        (f"{SEARCH} --model 99999-64-4 --cluster a100x8", "found num_layers=99999; give 10000"),
        pytest.param(
            f"{SEARCH} --model gpt3-18b --cluster v100x8",
            "does not fit on v100x8: the smallest",
            marks=pytest.mark.search,
        ),
        (f"{SEARCH} {ON_A100} --top 0", "--top 0: show at least one"),
        (f"{SEARCH} {ON_A100} --task-overhead-s -1", "found task_overhead_s=-1.0; it is zero or"),
        (
            f"{SEARCH} {ON_A100} --assume luck",
            "found 'luck'; it is one of preemptive-comm, offload, delay-weight-grads",
        ),
        (f"{SEARCH} --model t5 --cluster a100x64 --emit", "t5: Megatron-core runs no encoder"),
        ("--verson", "COMMAND; did you mean --version?"),
        ("trace pyproject.toml", "pyproject.toml: a file; give a folder that --trace wrote"),
    ],
)
def test_a_mistake_in_the_command_line_exits_with_2(fold3d, line: str, message: str):
    code, out, err = fold3d(line)
    assert (code, out) == (2, "")
    assert message in err.splitlines()[-1]


def test_a_flag_that_a_command_takes_is_not_taken_for_a_misspelt_one(fold3d):
    _, _, err = fold3d("search --model gpt3-18b --tp 8")
    assert err.endswith("the following arguments are required: --cluster\n")


def test_the_version_is_that_of_the_package(fold3d):
    assert fold3d("--version") == (0, f"fold3d {metadata.version('fold3d')}\n", "")


def test_every_command_explains_itself_in_one_line_with_one_example(fold3d, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    of_all = " ".join(fold3d("--help")[1].split())
    for command, summary in _COMMANDS.items():
        code, out, _ = fold3d(f"{command} --help")
        assert code == 0
        assert f"{command} {summary}" in of_all
        paragraphs = out.strip().split("\n\n")
        assert paragraphs[1] == f"{summary[0].upper()}{summary[1:]}."
        example = re.fullmatch(r"example:\n  (?:torchrun .*)?\bfold3d (\S+).*", paragraphs[-1])
        assert example is not None
        assert example[1] == command
        assert [line for line in out.splitlines() if len(line) > 80] == []


@pytest.mark.processes
def test_a_plan_passes_through_a_pipe():
    result = shell(f"fold3d {AIAO} --format csv | fold3d verify --plan-file -")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("cannot deadlock: 2 ranks, 2 segments, 3 micro-batches")


@pytest.mark.processes
def test_a_reader_that_has_seen_enough_is_no_error():
    plan = "fold3d plan --schedule aiao --pp 8 --segments 4 --microbatches 500"
    result = shell(f"set -o pipefail; {plan} | head -c 3")
    assert (result.returncode, result.stdout, result.stderr) == (0, "0F0", "")


@pytest.mark.processes
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_reported():
    result = shell(f"fold3d {AIAO} > /dev/full")
    assert (result.returncode, result.stderr) == (2, "fold3d plan: No space left on device\n")


@pytest.mark.processes
def test_closed_streams_cause_no_traceback():
    assert shell(f"fold3d {AIAO} >&-").stderr == ""
    result = shell("fold3d verify --plan-file - <&-")
    assert (result.returncode, result.stderr) == (2, "fold3d verify: Bad file descriptor\n")


def test_ctrl_c_while_a_command_is_loaded_causes_no_traceback(fold3d, monkeypatch):
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("megatron.fold3d.cli.import_module", interrupted)
    assert fold3d(AIAO) == (130, "", "")


@pytest.mark.processes
@pytest.mark.parametrize("line", ["verify --plan-file /nowhere", "--help"])
def test_plans_are_verified_without_loading_the_simulator(line: str):
    heavy = "{'numpy', 'torch', *(f'megatron.fold3d.{r}' for r in ('observe', 'predict'))}"
    heavy += " & set(sys.modules)"
    code = (
        "import sys\nfrom megatron.fold3d.cli import main\n"
        f"try: main({shlex.split(line)})\nexcept SystemExit: pass\nprint({heavy})"
    )
    assert printed(sys.executable, "-c", code).endswith("set()\n")


def test_a_word_that_is_nearly_an_option_or_begins_one_gets_a_suggestion():
    known = ["--segments", "--seed", "--schedule", "--save", "--save-interval"]
    assert suggestion(["--segmnts=2"], known) == "; did you mean --segments?"
    assert suggestion(["--seg", "--sched"], known) == "; did you mean --segments, --schedule?"
    assert suggestion(["--frobnicate", "2"], known) == ""
