"""The compiled side of offloading builds here, as far as it can be tried without a GPU."""

import ctypes
import shutil
from pathlib import Path

import pytest
import torch

from megatron.fold3d.runtime.offload import offload_library
from tests.programs import ROOT, printed

pytestmark = pytest.mark.processes

FLAGS = ["-std=c++20", "-g", "-O1", "-Wall", "-Wextra", "-Werror", "-fno-omit-frame-pointer"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_pinned_memory_keeps_its_promises_under_the_address_sanitizer(tmp_path: Path):
    program = tmp_path / "test"
    sources = [ROOT / "tests/runtime/offload/pinned_pool_test.cpp", ROOT / "csrc/pinned_pool.cpp"]
    sanitize = "-fsanitize=address,undefined"
    printed("g++", *FLAGS, sanitize, f"-I{ROOT / 'csrc'}", *sources, "-o", program)
    options = {"ASAN_OPTIONS": "detect_leaks=1:allocator_may_return_null=1"}
    assert printed(program, **options) == "ok\n"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc: needs the CUDA toolkit")
def test_the_library_compiles_and_says_what_is_wrong_without_a_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    library = tmp_path / "offload.cuda.so"
    printed(ROOT / "scripts/build_cuda.sh", "sm_80", library)
    monkeypatch.setattr(offload_library, "LIBRARY", library)
    offload_library._library.cache_clear()

    assert ctypes.CDLL(str(library)).fold3d_kernel_copy
    if torch.cuda.is_available():
        pytest.skip("with a GPU, tests/gpu try the library itself")
    with pytest.raises(OSError, match="4096 bytes of host memory cannot be page-locked: CUDA"):
        offload_library.pinned_memory(4096)
    flat = [torch.zeros(16, dtype=torch.uint8)]
    with pytest.raises(RuntimeError, match="copy of activations: "):
        offload_library.batched_copy(flat, flat, 2)
    offload_library._library.cache_clear()


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc: needs the CUDA toolkit")
def test_the_library_copies_in_one_call_alone_or_one_by_one_as_the_driver_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    library = tmp_path / "offload.cuda.so"
    names = ("batched_copy.cpp", "pinned_pool.cpp", "offload.cpp")
    sources = [*(ROOT / "csrc" / name for name in names), Path(__file__).with_name("cuda_stub.cpp")]
    build = ["nvcc", "-std=c++20", "-shared", "-Xcompiler", "-fPIC,-Wall,-Werror", "-cudart=none"]
    more = [f"-I{ROOT / 'csrc'}", "-Xlinker", "--no-undefined,-Bsymbolic", "-o", library]
    printed(*build, *sources, *more)
    monkeypatch.setattr(offload_library, "LIBRARY", library)
    offload_library._library.cache_clear()
    stub = ctypes.CDLL(str(library))

    memory = offload_library.pinned_memory(3 * 4096)
    assert stub.stub_pinned() == 1
    for count, calls in ((3, (0, 1)), (1, (1, 1)), (3, (4, 1)), (3, (7, 1))):
        sent = [torch.randint(256, (4096,), dtype=torch.uint8) for _ in range(count)]
        offload_library.batched_copy(memory.split(4096)[:count], sent, 2)
        assert torch.equal(memory[: count * 4096], torch.cat(sent))
        assert (stub.stub_singles(), stub.stub_batches()) == calls
        if count == 1:
            stub.stub_gets_an_old_driver()
    with pytest.raises(RuntimeError, match="copy of activations: no CUDA-capable device"):
        offload_library.batched_copy(sent, sent, 2, num_blocks=1)
    offload_library._library.cache_clear()


def test_without_the_library_a_gpu_run_is_told_how_to_build_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(offload_library, "LIBRARY", tmp_path / "offload.cuda.so")
    offload_library._library.cache_clear()
    with pytest.raises(ImportError, match="run: make build-cuda"):
        offload_library.pinned_memory(4096)
