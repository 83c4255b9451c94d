"""The device of the tests under C++ code that asks c10 for streams: the scheduler of preemption."""

import ctypes
import fcntl
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch

from megatron.fold3d.runtime.preemption.communicator import extension
from tests.gpu_path.late_device import Event, LateDevice

_SOURCE = Path(__file__).with_suffix(".cpp")
_kept: list[Any] = []  # an event may outlive the device that made it
_INT = ctypes.c_int64
_KINDS = (
    ("current", ctypes.CFUNCTYPE(_INT)),
    ("exchange", ctypes.CFUNCTYPE(_INT, _INT)),
    ("from_pool", ctypes.CFUNCTYPE(_INT, ctypes.c_int)),
    ("record", ctypes.CFUNCTYPE(_INT, _INT, _INT)),
    ("query", ctypes.CFUNCTYPE(ctypes.c_int, _INT)),
    ("block", ctypes.CFUNCTYPE(None, _INT, _INT)),
    ("destroy", ctypes.CFUNCTYPE(None, _INT)),
)


class _Calls(ctypes.Structure):
    _fields_ = _KINDS


@contextmanager
def streams_for_cpp(device: LateDevice) -> Iterator[None]:
    """Give CPU tensors the device's streams in C++, if the scheduler's extension is built."""
    scheduler = extension()
    if scheduler is None:
        yield
        return
    library = ctypes.CDLL(str(_built()))
    functions = _functions(device)
    calls = _Calls(*(kind(functions[name]) for name, kind in _KINDS))
    _kept.append(calls)
    library.give_streams(ctypes.byref(calls))
    scheduler.give_cpu_streams(True)
    try:
        yield
    finally:
        scheduler.give_cpu_streams(False)
        library.give_streams(None)


def _functions(device: LateDevice) -> dict[str, Callable[..., Any]]:
    events: dict[int, Event] = {}
    numbers = count(1)

    def exchange(stream: int) -> int:
        before = device.current_stream()
        device.set_stream(device.streams[stream])
        return before.number

    def record(event: int, stream: int) -> int:
        event = event or next(numbers)
        events.setdefault(event, Event(device)).record(device.streams[stream])
        return event

    return {
        "current": lambda: device.current_stream().number,
        "exchange": exchange,
        "from_pool": lambda is_first: device.from_pool("C++", is_first=bool(is_first)).number,
        "record": record,
        "query": lambda event: events[event].query(),
        "block": lambda event, stream: device.streams[stream].wait_event(events[event]),
        "destroy": lambda event: events.pop(event, None) and None,
    }


def _built() -> Path:
    """Compile the library, once for this torch and this source."""
    root = Path(torch.__file__).parent
    key = f"{torch.__version__}-{_SOURCE.stat().st_mtime_ns}"
    built = Path(tempfile.gettempdir()) / f"fold3d-late-streams-{key}.so"
    with built.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ranks come here together
        if not built.exists():
            flags = ("-shared", "-fPIC", "-std=c++20", f"-I{root}/include", f"-L{root}/lib")
            made = built.with_suffix(".part")
            subprocess.run(["c++", *flags, str(_SOURCE), "-o", made, "-lc10"], check=True)
            made.rename(built)
    return built
