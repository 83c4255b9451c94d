"""The C++ scheduler, built from a changed source in a folder of its own."""

import fcntl
import hashlib
import shutil
import sys
import tempfile
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch

from tests.programs import ROOT, printed

_NAME = "megatron.fold3d.runtime.preemption._scheduler"


def build(file: str, change: Callable[[str], str]) -> Path:
    """Compile with a change in one file, once for this torch and these sources: half a minute."""
    texts = {source: source.read_text() for source in sorted((ROOT / "csrc").glob("*.*"))}
    texts[ROOT / file] = change(texts[ROOT / file])
    key = hashlib.sha256(repr((torch.__version__, [*texts.values()])).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), f"fold3d-scheduler-{key}")
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ranks come here together
        if not folder.exists():
            with tempfile.TemporaryDirectory() as temporary:
                tree = Path(temporary)
                (tree / "csrc").mkdir()
                for source, text in texts.items():
                    (tree / "csrc" / source.name).write_text(text)
                shutil.copy(ROOT / "setup.py", tree)
                command = (sys.executable, "setup.py", "-q", "build_ext", "--build-lib", "built")
                printed(*command, cwd=tree)
                shutil.move(tree / "built", folder)
    [library] = folder.rglob("_scheduler*.so")
    return library


def load(library: Path) -> None:
    """Put it in the place of ours, for as long as this process lives: it registers its types."""
    assert _NAME not in sys.modules
    spec = spec_from_file_location(_NAME, library)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[_NAME] = module
