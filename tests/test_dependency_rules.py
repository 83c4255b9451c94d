"""Who imports whom: as written in the source, and as loaded by a fresh interpreter."""

import ast
import json
import re
import sys
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from itertools import chain
from pathlib import Path

import pytest

from scripts.loaded_lines import called_files
from tests.distributed import run_distributed
from tests.programs import ROOT, printed

FOLD3D = "megatron.fold3d"
HEAVY = ("torch", "numpy", "megatron.core", "megatron.training", "fold3d_patches")

# What the files of a room may name in an import, besides the standard library, as the page says it:
# other rooms, and packages. The files of `megatron/fold3d` itself are under ".".
PAGE = (ROOT / "docs/architecture.md").read_text()
RULES = PAGE.partition("### Who imports whom\n")[2].partition("\n##")[0]
ROWS = re.findall(r"^\| `([\w.]+)` \| (.*) \| (.*) \|$", RULES, re.M)
ROOMS = {room: re.findall(r"`([\w.]+)`", inside) for room, inside, _ in ROWS}
FOREIGN = {room: re.findall(r"[\w.]+", outside) for room, _, outside in ROWS}
MAY_NAME = {
    room: (*(f"{FOLD3D}.{name}" for name in (room, *others)), *FOREIGN[room])
    for room, others in ROOMS.items()
}


def reach(room: str) -> set[str]:
    """The rooms to which the imports of a room lead."""
    return {room}.union(*(reach(name.split(".")[0]) for name in ROOMS[room]))


# What must not be loaded after all of a room's files are imported, through whomever: rooms that
# its imports do not lead to, heavy packages but for these, and some more.
LOADS = {
    "runtime": ("torch", "numpy", "megatron.core"),
    "predict": ("numpy",),
    "commands": ("numpy",),
    "training": HEAVY,
}
LATER = {
    "runtime": (f"{FOLD3D}.observe.report",),
    "training": ("apex", "transformer_engine", f"{FOLD3D}.observe.report"),
    ".": (f"{FOLD3D}.training", f"{FOLD3D}.runtime"),
}
MUST_NOT_LOAD = {
    room: (
        *(name for name in HEAVY if name not in LOADS.get(room, ())),
        *(f"{FOLD3D}.{other}" for other in ROOMS if other not in reach(room)),
        *LATER.get(room, ()),
    )
    for room in ROOMS
}
FOLDERS = list(ROOMS)

# Runs in a fresh interpreter. Each step imports some modules, which stay, and others in a copy of
# the interpreter; it tells what these changed.
PROBE = """
import importlib, json, os, sys, threading

def functions():
    upstream = [n for n in sys.modules if n.split(".")[0] in ("torch", "megatron")]
    return {
        f"{name}:{key}": id(value)
        for name in upstream
        for key, value in vars(sys.modules[name]).copy().items()
        if callable(value)
    }

for step, first, second in json.loads(sys.argv[1]):
    for name in first:
        importlib.import_module(name)
    if os.fork():
        os.wait()
        continue
    before, threads = functions(), set(threading.enumerate())
    for name in second:
        importlib.import_module(name)
    after = functions()
    torch = sys.modules.get("torch")
    print(json.dumps([step, {
        "loaded": sorted(sys.modules),
        "threads": [thread.name for thread in set(threading.enumerate()) - threads],
        "patched": [key for key, value in before.items() if after.get(key) != value],
        "devices": torch is not None and torch.cuda.is_initialized(),
        "groups": torch is not None and torch.distributed.is_initialized(),
    }]), flush=True)
    os._exit(0)
"""
EVERYTHING = "all rooms and patches"
# Before these steps; their rooms may load it.
UPSTREAM = {
    "runtime": ["torch", "megatron.core.distributed", "megatron.core.pipeline_parallel.schedules"],
    "training": ["megatron.training.training"],
}


def files(folder: str) -> list[Path]:
    pattern = "*.py" if folder == "." else "**/*.py"
    return sorted((ROOT / "megatron/fold3d" / folder).glob(pattern))


def module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.fixture(scope="module")
def probed() -> dict[str, dict[str, list[str]]]:
    """What the import of each room changes, and of all with the patches."""
    ours = {folder: [module(path) for path in files(folder)] for folder in FOLDERS}
    light = [folder for folder in FOLDERS if folder not in UPSTREAM]
    steps = [[folder, UPSTREAM.get(folder, []), ours[folder]] for folder in (*light, *UPSTREAM)]
    patches = [module(path) for path in sorted((ROOT / "fold3d_patches").rglob("*.py"))]
    steps.append([EVERYTHING, [], [*chain(*ours.values()), *patches]])
    out = printed(sys.executable, "-W", "ignore", "-c", PROBE, json.dumps(steps))
    told = [json.loads(line) for line in out.splitlines() if line.startswith('["')]
    assert len(told) == len(steps), out
    return dict(told)


def imports(tree: ast.AST) -> Iterator[tuple[str, ...]]:
    """The modules that a file names, also inside functions, each with a name from it if any."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name,) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"from {node.module}: a relative import hides where it leads"
            yield from ((node.module or "", alias.name) for alias in node.names)


def is_within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_file_names_only_what_its_folder_may(folder: str):
    foreign = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files(folder)
        for name, *_ in imports(ast.parse(path.read_text()))
        if name.split(".")[0] not in sys.stdlib_module_names
        and not is_within(name, MAY_NAME[folder])
    }
    assert foreign == set()


class NotForTypes(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)


def test_no_files_import_each_other_in_a_circle():
    everything = chain(*map(files, FOLDERS), (ROOT / "fold3d_patches").rglob("*.py"))
    paths = {module(path): path for path in everything}

    def needs(path: Path) -> Iterator[str]:
        for names in imports(NotForTypes().visit(ast.parse(path.read_text()))):
            yield ".".join(names) if ".".join(names) in paths else names[0]

    circle = TopologicalSorter({name: {*needs(path)} - {name} for name, path in paths.items()})
    circle.prepare()  # or raises CycleError, which names it


@pytest.mark.processes
@pytest.mark.parametrize("folder", FOLDERS)
def test_importing_a_folder_loads_only_what_it_may(probed, folder: str):
    loaded = probed[folder]["loaded"]
    assert [name for name in loaded if is_within(name, MUST_NOT_LOAD[folder])] == []


def test_every_folder_is_a_room_with_rules():
    folders = {path.parent.name for path in (ROOT / "megatron/fold3d").glob("*/__init__.py")}
    assert folders | {"."} == set(ROOMS)
    assert all(MUST_NOT_LOAD[room] for room in ROOMS)


def test_rooms_have_no_two_files_of_one_name():
    rooms = [room for room in ROOMS if room not in (".", "commands")]
    paths = [path for path in chain(*map(files, rooms)) if path.name != "__init__.py"]
    assert repeated((path.name, path) for path in paths) == {}


@pytest.mark.slow
def test_no_two_classes_have_one_name():
    paths = chain(*((ROOT / root).rglob("*.py") for root in ("megatron", "fold3d_patches")))
    classes = [
        (node.name, path)
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert "Fold3DConfig" in dict(classes)
    assert repeated(classes) == {}


def repeated(named: Iterable[tuple[str, Path]]) -> dict[str, list[str]]:
    """The names that stand in several places."""
    homes: dict[str, list[str]] = {}
    for name, path in named:
        homes.setdefault(name, []).append(str(path.relative_to(ROOT)))
    return {name: paths for name, paths in homes.items() if len(paths) > 1}


# Imports each module in a copy of a fresh interpreter, and names those for which that fails.
EACH = """
import importlib, os, sys

for name in sys.argv[1:]:
    if not os.fork():
        importlib.import_module(name)
        os._exit(0)
    if os.wait()[1]:
        print(name)
"""


@pytest.mark.processes
def test_each_light_module_imports_on_its_own():
    names = [module(path) for path in files("plan") + files(".")]
    assert printed(sys.executable, "-c", EACH, *names, "no_such_module") == "no_such_module\n"


@pytest.mark.processes
def test_importing_starts_no_thread_and_patches_nothing(probed):
    seen = probed[EVERYTHING]
    assert (seen["threads"], seen["patched"]) == ([], [])
    assert (seen["devices"], seen["groups"]) == (False, False)


def test_megatron_stays_a_namespace_that_others_share():
    assert not (ROOT / "megatron" / "__init__.py").exists()
    import megatron

    assert megatron.__file__ is None
    homes = [home for home in map(Path, megatron.__path__) if (home / "core").is_dir()]
    assert str(ROOT / "megatron") in megatron.__path__
    assert homes
    assert ROOT / "megatron" not in homes


# What a run of plain `aiao` has no use for, and so must not load.
OFF = tuple(
    f"{FOLD3D}.{name}"
    for name in (
        *("runtime.offload", "runtime.preemption", "runtime.weight_grads", "runtime.trace"),
        "runtime.tensor_parallel",
        *("runtime.grad_sync.second_lane", "runtime.grad_sync.due_steps"),
        "runtime.transfers.host_link",
        *("observe", "predict", "commands"),
    )
)
BEFORE_FEATURES = 8736
"""Lines that the executor and the patches of `aiao` loaded when they imported every feature."""

PASSED = 19
"""Files of ours whose functions ran from a carried stage's last backward to its step, at first."""


@pytest.mark.processes
def test_plain_aiao_loads_no_feature_that_is_off_and_fewer_than_half_of_the_lines():
    told = printed(sys.executable, "scripts/loaded_lines.py")
    *modules, total = (line.split() for line in told.splitlines())
    assert [name for _, name in modules if is_within(name, OFF)] == []
    assert f"{FOLD3D}.runtime.executor" in [name for _, name in modules]
    assert int(total[0].replace(",", "")) < BEFORE_FEATURES / 2


@pytest.mark.gloo
def test_a_gradient_of_a_carried_stage_passes_no_more_files():
    files, *_ = run_distributed(called_files, 4)
    assert "megatron/fold3d/runtime/grad_sync/partial_step.py" in files
    assert len(files) <= PASSED
