"""The quick start's changes of a script that knows no fold3d: it trains what stock trains."""

import ast
import contextlib
import inspect
import io
import json
import os
import re
import runpy
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.distributed import run_distributed
from tests.end_to_end.test_bad_runs import said_by_refused
from tests.end_to_end.test_equal_to_stock import ONE_GROUP
from tests.end_to_end.training import Record, as_known, differences, recorded

pytestmark = pytest.mark.gloo

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/quickstart.md"
SCRIPT = Path(__file__).with_name("own_script.py")
DEVICE, OURS = "--device cpu", "--schedule aiao --segments 2"
(COMMAND,) = re.findall(
    r"^torchrun --nproc-per-node 2 own_script.py (.*)$", PAGE.read_text().replace("\\\n", " "), re.M
)
FLAGS = shlex.join(shlex.split(COMMAND)).replace(OURS, "")
UNTOUCHED = f"{FLAGS.replace(DEVICE, '')} --num-virtual-stages-per-pipeline-rank 2".split()
ONE_GROUP_OF_4 = ONE_GROUP.format(m=4)


def test_a_script_with_the_two_lines_of_the_page_trains_what_it_trained(tmp_path: Path) -> None:
    script = changed("Your own script", tmp_path)
    ours = run_distributed(run_recorded, 2, str(script), COMMAND.split())
    stock = run_distributed(_train_on_cpu, 2, str(SCRIPT), UNTOUCHED)

    assert ours[1].iterations[0].keys() >= {"focal loss", "grad norm"}
    assert differences(ours, stock) == []


def test_a_script_that_parses_by_itself_takes_the_patches_later(tmp_path: Path) -> None:
    script = changed("A script that parses by itself", tmp_path)
    scheduled = [*UNTOUCHED, "--schedule", "breadth-first"]
    ours = run_distributed(_train_on_cpu, 2, str(script), scheduled)
    grouped = [*UNTOUCHED, *ONE_GROUP_OF_4.split()]
    stock = run_distributed(_train_on_cpu, 2, str(SCRIPT), grouped)
    assert differences(ours, stock) == []


@pytest.mark.parametrize(
    ("frozen", "ours"),
    [
        (r"\.bias$", "--schedule aiao:wgrad=behind@0 --segments 2"),
        (r"linear_proj", "--schedule aiao:wgrad=gaps --segments 2"),
        (r"^0\.", "--schedule auto --segments 2 --train-iters 12"),
        (r"^(?!.*norm)", "--schedule auto --segments 2 --train-iters 12"),
        (r".", "--schedule aiao:step=next --segments 2"),
    ],
)
def test_frozen_parameters_stay_as_they_are(frozen: str, ours: str, tmp_path: Path) -> None:
    """A pattern is of ``chunk.name``; the segment of chunk 0 has nothing that is trained then."""
    script = changed("Your own script", tmp_path)
    argv = f"{FLAGS} --untie-embeddings-and-output-weights --overlap-grad-reduce {ours}"
    stock = re.sub(r"--schedule \S+", "--schedule stock", argv)
    found, expected = (
        run_distributed(run_recorded, 2, str(script), [*words.split(), "--freeze", frozen])
        for words in (argv, stock)
    )
    assert differences(found, as_known(found, expected)) == []


@pytest.mark.parametrize(
    ("heading", "flags", "reason"),
    [
        ("Your own script", "--schedule aio", "'aio' is no order"),
        (
            "A script that parses by itself",
            "--schedule aiao --segments 2",
            "--segments 2: .*--num-virtual-stages-per-pipeline-rank 2",
        ),
        (
            "A script that parses by itself",
            "--schedule aiao --segments auto",
            "--segments auto: .*or parse with fold3d.parse_args",
        ),
    ],
)
def test_a_mistake_ends_a_script_in_one_message(
    heading: str, flags: str, reason: str, tmp_path: Path
) -> None:
    later = heading != "Your own script"
    argv = (FLAGS.replace(DEVICE, "") if later else FLAGS).split() + flags.split()
    script = str(changed(heading, tmp_path))
    said = said_by_refused(_refusal, script, argv, later)
    assert re.fullmatch(rf"own_script.py: error: .*{reason}.*\n", said), said
    assert json.loads(Path(f"{script}0").read_text())["message"]["message"] + "\n" == said


def test_what_only_a_script_can_ask_for_is_refused_before_training(tmp_path: Path) -> None:
    """Stock would evaluate on the last rank alone, and wait there until the timeout."""
    script = changed("Your own script", tmp_path)
    text = script.read_text()
    text = text.replace("forward_step)\n", "forward_step, process_non_loss_data_func=print)\n")
    varies = "    config.model.transformer.variable_seq_lengths = True\n"
    text = text.replace("    pretrain(", f"{varies}    pretrain(")
    script.write_text(text)
    argv = f"{FLAGS} --schedule 1f1b".split()
    said = said_by_refused(_refusal, str(script), argv, False)
    assert re.findall(r"^own_script.py: error: (.*?): ", said, re.M) == [
        "variable_seq_lengths",
        "process_non_loss_data_func with --pipeline-model-parallel-size 2",
    ]
    assert "non_loss_data_func, which all ranks call" in said


def changed(heading: str, folder: Path, script: Path = SCRIPT) -> Path:
    """Apply the change that the page shows under a heading; returns the script that results."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", section, re.M | re.S)
    text = script.read_text()
    for hunk in re.split(r"^@@\n", diff, flags=re.M):
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] != "+")
        after = "".join(line[1:] for line in lines if line[0] != "-")
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    result = folder / script.name
    result.write_text(text)
    return result


def run_recorded(script: str, argv: Sequence[str]) -> Record:
    sys.argv = [script, *argv]
    return recorded(lambda: runpy.run_path(script, run_name="__main__"))


def _train_on_cpu(script: str, argv: Sequence[str]) -> Record:
    """Run a script that knows no ``--device``, with what that flag stands for."""
    from fold3d_patches import compile_helpers, cpu
    from fold3d_patches.cpu.flags import FLAGS as OF_CPU
    from fold3d_patches.registry import apply

    installs = "fold3d.install" in Path(script).read_text()
    with apply([*cpu.patches(), *(() if installs else compile_helpers.PATCHES)]):
        return run_recorded(script, [*OF_CPU, *argv])


def _refusal(script: str, argv: Sequence[str], later: bool) -> tuple[int, str]:
    """Return the script's exit code on this rank, and what it says."""
    from megatron.fold3d.training import mistakes

    mistakes.PATIENCE_S = 0.0
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{script}{os.environ['RANK']}"
    run = _train_on_cpu if later else run_recorded
    with contextlib.redirect_stderr(io.StringIO()) as said, pytest.raises(SystemExit) as left:
        run(script, argv)
    assert isinstance(left.value.code, int)
    return left.value.code, said.getvalue()


def test_the_interface_has_the_signatures_of_its_stub() -> None:
    import megatron.fold3d as fold3d

    stub = ast.parse((ROOT / "megatron/fold3d/__init__.pyi").read_text())
    typed = {node.name: node for node in stub.body if isinstance(node, ast.FunctionDef)}
    assert sorted(typed) == ["add_arguments", "bridge", "install", "parse_args"]
    for name, node in typed.items():
        parameters = inspect.signature(getattr(fold3d, name)).parameters.values()
        for kind, arguments in (
            (inspect.Parameter.POSITIONAL_OR_KEYWORD, node.args.args),
            (inspect.Parameter.KEYWORD_ONLY, node.args.kwonlyargs),
        ):
            assert [p.name for p in parameters if p.kind is kind] == [a.arg for a in arguments]
    with pytest.raises(AttributeError, match="no attribute 'pars_args'"):
        fold3d.pars_args()
