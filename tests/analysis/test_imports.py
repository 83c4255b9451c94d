import subprocess
import sys


def test_analysis_needs_neither_torch_nor_megatron_core():
    code = (
        "import pkgutil, sys, importlib, megatron.fold3d.analysis as package\n"
        "for m in pkgutil.iter_modules(package.__path__, package.__name__ + '.'):\n"
        "    importlib.import_module(m.name)\n"
        "print([m for m in ('torch', 'megatron.core') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout == "[]\n", run.stderr
