"""What `make` runs before Python does: finding an interpreter, filling `.venv` once."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import pytest

from megatron.fold3d.config.read_config import read_config
from tests.programs import ROOT, printed, ran

pytestmark = pytest.mark.processes

CLAIMS = (ROOT / "docs/gpu.md").read_text().partition("| claim ")[2].partition("\n\n")[0]
NEEDED_COMMANDS = ("bash", "cat", "dirname", "env", "mkdir")


class Machine:
    """A checkout and a PATH that holds nothing but a shell and what the test puts there."""

    def __init__(self, folder: Path) -> None:
        self.checkout = folder / "checkout"
        self.bin = folder / "bin"
        shutil.copytree(ROOT / "scripts", self.checkout / "scripts")
        for name in ("pyproject.toml", "setup.py", ".python-version"):
            shutil.copy(ROOT / name, self.checkout)
        self.bin.mkdir()
        for name in NEEDED_COMMANDS:
            (self.bin / name).symlink_to(shutil.which(name))

    def command(self, name: str, script: str) -> Path:
        """Install a shell script as a command; ``name`` may be a path outside of PATH."""
        path = self.bin / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!{self.bin}/bash\n{script}\n")
        path.chmod(0o755)
        return path

    def python(self, name: str, version: tuple[int, int, int], lacks: str = "") -> Path:
        """Install an interpreter that says it has a version, and cannot import one module."""
        pretend = f"import sys; sys.version_info = {version}; sys.modules['{lacks}'] = None"
        return self.command(
            name, f'exec {sys.executable} -c "{pretend}; exec(sys.stdin.read())" "${{@:2}}"'
        )

    def run(
        self, script: str, *options: str, **environment: Path
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.checkout / "scripts" / script, *options],
            env={"PATH": str(self.bin), "HOME": "/nowhere", **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_too_old_python_is_one_error_that_says_what_was_found(machine: Machine):
    old = machine.python("python3", (3, 8, 18))
    result = machine.run("python.sh")
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.count("error:") == 1
    assert f"{old}: 3.8.18, older than 3.12" in result.stderr
    assert "pyenv install 3.12" in result.stderr


def test_machine_without_python_is_told_so(machine: Machine):
    result = machine.run("python.sh")
    assert result.returncode == 1
    assert "neither pyenv nor uv nor any python is on the PATH" in result.stderr


def test_python_without_venv_is_passed_over(machine: Machine):
    bare = machine.python("python3.12", (3, 12, 3), lacks="ensurepip")
    assert f"{bare}: 3.12.3, without the module ensurepip" in machine.run("python.sh").stderr
    whole = machine.python("python3.13", (3, 13, 0))
    assert machine.run("python.sh").stdout == f"{whole}\n"


def test_python3_is_taken_when_it_is_new_enough(machine: Machine):
    machine.command("python3.12", "exit 127  # as a pyenv shim of a version that is not set")
    machine.python("python3.13", (3, 14, 1))  # for which Megatron-core has no wheel
    new = machine.python("python3", (3, 13, 1))
    assert machine.run("python.sh").stdout == f"{new}\n"


def test_a_python_on_the_path_that_python_version_names_comes_first(machine: Machine):
    machine.python("python3.12", (3, 12, 3))
    named = machine.python("python3.13", (3, 13, 1))
    (machine.checkout / ".python-version").write_text("3.13\n")
    assert machine.run("python.sh").stdout == f"{named}\n"


def test_pyenv_serves_what_python_version_names_else_what_it_has(machine: Machine):
    root = machine.bin.parent / "pyenv"
    other = machine.python(str(root / "versions/3.13.0/bin/python"), (3, 13, 0))
    machine.command("pyenv", f'[[ $1 == root ]] && echo "{root}"')
    assert machine.run("python.sh").stdout == f"{other}\n"

    named = machine.python(str(root / "versions/3.12.1/bin/python"), (3, 12, 1))
    machine.command("pyenv", f'[[ $1 == root ]] && echo "{root}" || echo "{named.parents[1]}"')
    assert machine.run("python.sh").stdout == f"{named}\n"


def test_uv_serves_its_own_python(machine: Machine):
    managed = machine.python(str(machine.bin.parent / "uv/python3.12"), (3, 12, 9))
    machine.command("uv", f'[[ "$1 $2" == "python find" ]] && echo "{managed}"')
    assert machine.run("python.sh").stdout == f"{managed}\n"


def test_machine_without_a_compiler_is_told_what_it_misses(machine: Machine):
    result = machine.run("extension.sh")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.count("\n") == 1
    assert "No C++ compiler: --preemptive-comm" in result.stdout


@pytest.fixture
def installer(machine: Machine) -> Machine:
    """A machine whose Python makes environments and writes down every `pip install`."""
    log = machine.bin.parent / "log"
    log.touch()
    machine.command(
        "python3.12",
        f"""
        case "$1 $2 $3" in
            "-m venv --clear") mkdir -p "$4/bin"; cat "$0" >"$4/bin/python"
                               /bin/chmod +x "$4/bin/python"; echo venv >>{log} ;;
            "-m pip install") echo "pip ${{@: -1}}" >>{log}; echo "$@" >{log.parent}/pip
                              [[ ! -f {log.parent}/fails ]] ;;
            "- 3.12 3.13") echo 3.12.1 ;;
            "- cu126 "|"-  ") exec {sys.executable} "$@" ;;
        esac
        """,
    )
    return machine


INSTALLS = "pip .[train,dev]"


def work(machine: Machine, *options: str, **environment: Path) -> list[str]:
    """Run `make venv` and list what it did."""
    log = machine.bin.parent / "log"
    log.write_text("")
    machine.run("venv.sh", *options, **environment)
    return log.read_text().splitlines()


def test_second_run_does_nothing(installer: Machine):
    assert work(installer) == ["venv", INSTALLS]
    assert work(installer) == []


@pytest.mark.parametrize(
    ("driver", "pin"),
    [
        ("", "torch==2.13.0"),
        ("Driver Version: 550.54.15   CUDA Version: 12.4", "torch==2.13.0+cu126"),
        ("Driver Version: 580.159.04  CUDA Version: 13.0", "torch==2.13.0"),
    ],
)
def test_torch_is_built_for_the_driver(installer: Machine, driver: str, pin: str):
    if driver:
        installer.command("nvidia-smi", f"echo '| NVIDIA-SMI 1   {driver} |'")
    assert work(installer) == ["venv", INSTALLS]
    assert pin in (installer.checkout / ".venv/constraints.txt").read_text().splitlines()
    asked = (installer.bin.parent / "pip").read_text()
    assert ("https://download.pytorch.org/whl/cu126" in asked) == pin.endswith("+cu126")


def test_the_planner_is_installed_without_torch_and_training_over_it(installer: Machine):
    assert work(installer, "planner") == ["venv", "pip ."]
    assert work(installer, "planner") == []
    assert work(installer) == [INSTALLS]
    assert work(installer, "planner") == []  # the command is there


def test_a_uv_that_is_named_installs_in_place_of_pip_unless_it_fails(installer: Machine):
    log = installer.bin.parent / "log"
    uv = installer.command("named", f'echo "uv ${{@: -1}}" >>{log}; [[ ! -f {log.parent}/no-uv ]]')
    by_uv = INSTALLS.replace("pip", "uv")
    assert work(installer, UV=uv) == ["venv", by_uv]
    assert work(installer, UV=uv) == []
    (installer.checkout / "setup.py").write_text("# changed\n")
    (log.parent / "no-uv").touch()
    assert work(installer, UV=uv) == [by_uv, INSTALLS]
    assert work(installer) == []


@pytest.mark.parametrize("is_update", [False, True], ids=["first", "update"])
def test_an_installation_that_failed_is_tried_again(installer: Machine, is_update: bool):
    asked = ["venv", INSTALLS]
    if is_update:  # it keeps what is there
        assert work(installer) == asked
        with (installer.checkout / "pyproject.toml").open("a") as file:
            file.write("# changed\n")
        asked = [INSTALLS]
    fails = installer.bin.parent / "fails"
    fails.touch()
    assert work(installer) == asked
    fails.unlink()
    assert work(installer) == asked
    assert work(installer) == []


def test_moved_checkout_is_installed_afresh(installer: Machine):
    work(installer)
    installer.checkout = installer.checkout.rename(installer.bin.parent / "moved")
    assert work(installer) == ["venv", INSTALLS]


def test_environment_of_another_checkout_is_left_alone(installer: Machine):
    others = installer.bin.parent / "others"
    others.mkdir()
    (installer.checkout / ".venv").symlink_to(others)
    assert work(installer) == []
    assert not any(others.iterdir())


def test_a_step_that_the_gpu_script_lacks_is_refused(tmp_path: Path):
    done = ran(ROOT / "scripts/gpu.sh", tmp_path, sys.executable, "copys")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no step is called copys; there are machine doctor build extension" in done.stderr


@pytest.fixture
def gpu_node(machine: Machine) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run steps of the GPU script with a Python whose runs print what Megatron would."""
    folder = machine.bin.parent / "out"
    python = machine.command(
        "stub",
        """
        [[ $* == *"$HANGS"* ]] && sleep 100
        [[ $* == *":step=next"* ]] && loss=$LOSS || loss=2.000000E+00
        [[ $* == *"/trace/"* ]] && ms=100.0 || ms=$SLOW
        for i in {1..20}; do
            echo " iteration $i/ 20 | elapsed time per iteration (ms): $ms | lm loss: $loss |"
        done
        """,
    )

    for tool in ("nvidia-smi", "nvcc"):
        machine.command(tool, "exit 0")

    def run(
        *steps: str, loss: str = "2.000000E+00", untraced_ms: str = "99.0", hangs: str = "none"
    ) -> subprocess.CompletedProcess[str]:
        environment = {"GPUS": "8", "IMPLEMENTATIONS": "local transformer_engine"}
        environment |= {"LOSS": loss, "SLOW": untraced_ms, "HANGS": hangs}
        if hangs != "none":
            environment["STEP_SECONDS"] = "1"
        environment |= {"PATH": f"{machine.bin}:{os.environ['PATH']}", "CUDA_HOME": ""}
        return ran(ROOT / "scripts/gpu.sh", folder, python, *steps, **environment)

    return run


TRACES = "traces and `auto` do not hold up the one queue"


def test_the_gpu_script_runs_every_step_and_judges_every_claim(gpu_node, tmp_path: Path):
    done = gpu_node()
    assert done.returncode == 0, done.stderr
    judged = done.stdout.partition("Claims of docs/gpu.md:\n")[2].splitlines()
    named = [row.split("|") for row in CLAIMS.split("\n")[2:] if "`" in row.split("|")[3]]
    verdicts = {line[13:].strip(): line[:13].strip() for line in judged}
    of_claims = {verdicts[row[1].strip()] for row in named}
    assert of_claims == {"confirmed", "measured"}
    report = (tmp_path / "out/report.txt").read_text()
    assert report.count("\n===== ") == done.stdout.count("\n== ") + 1


def test_other_losses_and_slow_traces_contradict_claims(gpu_node):
    deferred = [f"local-dp-{name}" for name in ("stock", "share", "share-losses")]
    traced = [f"local-pp-{name}" for name in ("traced", "untraced", "traced-time")]
    done = gpu_node(*deferred, *traced, loss="2.000001E+00", untraced_ms="90.0")
    assert done.returncode == 1
    assert "failed: local-dp-share-losses local-pp-traced-time; see " in done.stderr
    assert f"\nCONTRADICTED  {TRACES} \n" in done.stdout
    assert "\nCONTRADICTED  activations and messages in host memory and DP.sync in " in done.stdout


def test_a_step_that_hangs_fails_and_stops_no_other(gpu_node):
    done = gpu_node("queue-1", "queue-8", "local-stock", hangs="bench.queues")
    assert done.returncode == 1
    assert "failed: queue-1 queue-8; see " in done.stderr
    assert "lm loss: 2.000000E+00" in done.stdout.partition("local-stock  ")[2]


def test_every_stress_check_is_run_with_options_that_it_has(machine: Machine):
    (machine.bin / "date").symlink_to(shutil.which("date"))
    machine.command(str(machine.checkout / ".venv/bin/python"), 'echo "run: $*"; exit 1')
    done = machine.run("stress.sh")
    assert done.returncode == 1
    runs = [line.split() for line in done.stdout.splitlines() if line.startswith("run: ")]
    *checks, marked = runs
    names = [run[4].removeprefix("tests.stress.") for run in checks]
    assert f"failed: {' '.join(names)} marked; seed " in done.stderr
    assert "one_queue" in names
    assert marked[-3:] == ["--stress", "-m", "stress"]
    for name, run in zip(names, checks, strict=True):
        files = (f"{name}.py", "program.py")  # its own options, and those that some share
        source = "".join((ROOT / "tests/stress" / file).read_text() for file in files)
        for option in run[5:]:
            assert "{" not in option
            assert not option.startswith("--") or f'"{option}"' in source


def test_what_the_gpu_script_would_train_is_valid(parser, monkeypatch, tmp_path):
    script = (ROOT / "scripts/gpu.sh", "--dry-run", tmp_path / "out", "python")
    said = printed(*script, GPUS="8", IMPLEMENTATIONS="local transformer_engine")
    assert not (tmp_path / "out").exists()
    claimed = re.findall(r"`(\S+?)`", "".join(row.split("|")[3] for row in CLAIMS.split("\n")[2:]))
    trained = {}
    for line in said.splitlines():
        if "pretrain_gpt.py" in line:
            name, words = line.removeprefix("== ").split(": ", 1)
            monkeypatch.setenv(*words.split()[1].split("="))
            args = parser.parse_args(words.split("pretrain_gpt.py ")[1].split())
            trained[name] = read_config(args).choice.order
            assert any(fnmatch(name, pattern) for pattern in claimed)
    assert len(trained) == 2 * 27 - 1  # pairs are for Megatron's own layers
    assert {trained["local-stock"], trained["transformer_engine-pp-aiao"]} == {"stock", "aiao"}
    assert {*trained.values()} == {"stock", "aiao", "1f1b", "auto"}
    for connections in (1, 8, 32):
        assert f"== queue-{connections}: env CUDA_DEVICE_MAX_CONNECTIONS={connections} " in said
