"""Meet one rank of a job with a fault at one of its actions, and see what is left afterwards.

    python -m tests.stress.faults --minutes 60 --seed 7 --log faults.jsonl

A job saves a checkpoint after its second and fourth iteration. In the fifth, or while it saves or
loads, one rank meets a fault. Afterwards

- every rank has ended, with an exit code that says so, and nothing that it started is left;
- nothing is left in shared memory, and no lock file;
- the failure is named once, last on the terminal, and in the error file of the launcher;
- the last complete checkpoint goes on to where an undisturbed run ends, bit for bit.

A fault that a job survives changes none of its results. Each line of the log is one case.
"""

import gc
import itertools
import json
import math
import os
import random
import re
import resource
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import torch

from scripts.bench.testbed import Link, Testbed
from tests.distributed import RankError, end_with_parent, run_distributed
from tests.end_to_end.training import Record, differences, recorded, since, watch
from tests.stress.flag_sets import MODEL
from tests.stress.program import append, options, until

ITERATIONS, SAVE_INTERVAL, LAST_SAVED, FAULTY = 6, 2, 4, 5
RUN = (
    f"{MODEL} --num-layers 4 --micro-batch-size 1 --eval-iters 0 --eval-interval 100 "
    f"--train-iters {ITERATIONS} --lr-decay-iters 10 --save-interval {SAVE_INTERVAL} "
    "--distributed-timeout-minutes 1"
)
BATCH = "--global-batch-size 4"
STAGES = f"--pipeline-model-parallel-size 2 --segments 2 {BATCH}"
PIPELINE = f"{STAGES} --schedule aiao"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
TRACKER = "latest_checkpointed_iteration.txt"
TIMEOUT_S = 12.0  # of transfers, where a case waits for it
GRACE_S = 40.0  # in which all ranks end after the first
DISK = "8m"


@dataclass(frozen=True, slots=True)
class Features:
    """What is on in a job."""

    flags: str
    num_ranks: int = 2


FEATURES: Mapping[str, Features] = {
    "plain": Features(PIPELINE),
    "preemptive": Features(
        f"{PIPELINE}:step=next:share=0.5 --overlap-grad-reduce --preemptive-comm --clip-grad 0"
    ),
    "offloaded": Features(f"{PIPELINE} --offload-activations on --lazy-inter-segment"),
    "delayed": Features(f"{PIPELINE}:wgrad=last --bf16"),
    "in background": Features(f"{PIPELINE} --async-save --trace FOLDER/trace"),
    "pairs": Features(f"{BATCH} --tensor-model-parallel-size 2 --schedule afab:pairs=on"),
    "auto": Features(f"{STAGES} --schedule auto"),
    "replicas": Features(f"{PIPELINE} {SHARDED} --preemptive-comm", num_ranks=4),
    "shards": Features(
        f"{PIPELINE} {SHARDED} --bf16 --segments 3 --num-layers 6 --shard-segments gradients",
        num_ranks=4,
    ),
    "codes": Features(
        f"{PIPELINE} --bf16 {SHARDED} --delta-param-gather on --coded-grad-reduce on", num_ranks=4
    ),
}
LAUNCHERS = ("torchrun", "patient")  # the latter waits for all ranks, as `srun` can


@dataclass(frozen=True, slots=True)
class Case:
    """A fault of one rank.

    Attributes:
        features: the name of what is on.
        fault: the fault's name.
        rank: the rank that meets it.
        position: of its action in the program of the rank, from 0 up to 1.
        launcher: what starts the ranks, and ends them when one has failed.
    """

    features: str
    fault: str
    rank: int
    position: float
    launcher: str

    @property
    def ranks(self) -> range:
        return range(FEATURES[self.features].num_ranks)

    def __str__(self) -> str:
        at = f" at {self.position:.3f}" if isinstance(FAULTS[self.fault], Fault) else ""
        return f"{self.fault} on rank {self.rank}{at}, {self.features}, {self.launcher}"


@dataclass(slots=True)
class Ended:
    """How a job ended.

    Attributes:
        codes: exit codes by rank; none of a rank that had to be killed.
        terminal: what ranks and launcher printed.
        errors: the error files of the launcher, by rank.
        cause: the rank that the launcher names.
        records: of the ranks that trained to the end.
    """

    codes: dict[int, int]
    terminal: str
    errors: dict[int, str]
    cause: int | None
    records: list[Record]


def cases() -> list[Case]:
    """Return every case: each fault at each action of each rank, with each set of features."""
    found = []
    for features, fault in itertools.product(FEATURES, _faults()):
        programs = undisturbed(features).programs
        for rank in range(len(programs))[FAULTS[fault].where]:
            count = len(programs[rank]) if isinstance(FAULTS[fault], Fault) else 1
            found += [
                Case(features, fault, rank, number / count, launcher)
                for number in range(count)
                for launcher in FAULTS[fault].launchers()
            ]
    return found


def _faults() -> Iterator[str]:
    """Yield the faults that this user can make."""
    return (name for name in FAULTS if os.geteuid() == 0 or not needs_root(name))


def needs_root(fault: str) -> bool:
    """True of faults of small disks and of cables."""
    return isinstance(FAULTS[fault], OnDisk | OnLink)


def problems(case: Case) -> list[str]:
    """Run a case; returns what was not as it should be."""
    fault = FAULTS[case.fault]
    before = undisturbed(case.features)
    shared = _shared_memory()
    with TemporaryDirectory(prefix="fault-") as name, fault.place(Path(name)):
        folder = Path(name)
        if fault.loads:
            shutil.copytree(before.saved, folder / "saved")
            _set_tracker(folder, LAST_SAVED)
            fault.prepare(folder)
        ended = _run(case, folder)
        found = [f"a process is left: {process}" for process in _left(folder)]
        found += [f"left in shared memory: {path}" for path in _abandoned(shared)]
        found += [f"left: {path}" for path in folder.rglob("*") if "lock" in path.name.lower()]
        if fault.is_harmless:
            return [*found, *_strayed(ended, before.records, LAST_SAVED if fault.loads else 0)]
        if untold := fault.untold(case, ended):
            found += [*untold, f"the terminal:\n{ended.terminal[-6000:]}"]
        fault.mend(folder)
        saved = _saved(folder)
        if saved < SAVE_INTERVAL:
            return [*found, f"the last complete checkpoint is of iteration {saved}"]
        resumed = _run(replace(case, fault=NOTHING, launcher="patient"), folder, fault.resumed)
        return [*found, *_strayed(resumed, before.records, saved)]


def _strayed(ended: Ended, undisturbed: Sequence[Record], iteration: int) -> list[str]:
    """Return how a run behind an iteration was not as the undisturbed one."""
    if ended.codes != dict.fromkeys(range(len(undisturbed)), 0):
        return [f"from iteration {iteration} on: {ended.codes}", ended.terminal[-3000:]]
    return differences(ended.records, since(iteration, undisturbed))


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """A run without a fault: its records, each rank's actions, its checkpoints."""

    records: list[Record]
    programs: list[list[str]]
    saved: Path


@cache
def undisturbed(features: str) -> Undisturbed:
    """Return the run that a job with these features is compared with."""
    folder = Path(_kept(), features.replace(" ", "-"))
    folder.mkdir()
    case = Case(features, NOTHING, 0, 0.0, "patient")
    ended = _run(case, folder)
    if any(ended.codes.values()):
        raise RuntimeError(f"{features} fails without a fault: {ended.codes}\n{ended.terminal}")
    programs = [(folder / f"program{rank}").read_text().split() for rank in case.ranks]
    return Undisturbed(ended.records, programs, folder / "saved")


@cache
def _kept() -> str:
    import atexit

    folder = mkdtemp(prefix="faults-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _run(case: Case, folder: Path, flags: str = "") -> Ended:
    """Run the case's job in its folder, from the checkpoint that is there."""
    for pattern in ("terminal", "error*", "record*", "pid*"):
        for path in folder.glob(pattern):
            path.unlink()
    run = _by_torchrun if case.launcher == "torchrun" else _patiently
    codes, cause = run(case, folder, flags)

    def written(name: str) -> dict[int, str]:
        paths = {rank: folder / f"{name}{rank}" for rank in case.ranks}
        return {rank: path.read_text() for rank, path in paths.items() if path.exists()}

    return Ended(
        codes,
        (folder / "terminal").read_text(errors="replace"),
        written("error"),
        cause,
        [Record(**json.loads(text)) for text in written("record").values()],
    )


def _patiently(case: Case, folder: Path, flags: str) -> tuple[dict[int, int], int | None]:
    """Wait for all ranks; returns the exit codes of those that ended by themselves."""
    try:
        run_distributed(
            _rank,
            len(case.ranks),
            *(case, folder, flags),
            timeout_s=120,
            grace_s=15.0 if CONDITIONS[case.fault].stands else GRACE_S,
        )
    except RankError as error:
        codes = {f.rank: f.text.rpartition(" ")[2] for f in error.failures}
        return {rank: int(code) for rank, code in codes.items()}, None
    raise AssertionError("a rank's process does not return")


def _by_torchrun(case: Case, folder: Path, flags: str) -> tuple[dict[int, int], int | None]:
    """Start the ranks with torchrun's own agent; returns the exit code of the rank it names."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=len(case.ranks),
        run_id=folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
        shutdown_timeout=10,
    )
    try:
        elastic_launch(config, _rank)(case, folder, flags)
    except ChildFailedError as error:
        with (folder / "terminal").open("a") as terminal:
            terminal.write(f"\n{error}\n")
        for path in folder.glob("logs/*/attempt_0/*/error.json"):
            path.rename(folder / f"error{path.parent.name}")
        rank, failure = error.get_first_failure()
        return {rank: failure.exitcode}, rank
    return dict.fromkeys(case.ranks, 0), None


def _rank(case: Case, folder: Path, flags: str) -> None:
    """Run the script on this rank as a launcher does, with the fault armed."""
    import pretrain_gpt
    from megatron.fold3d.training import leaving

    rank, fault = int(os.environ["RANK"]), CONDITIONS[case.fault]
    if case.launcher == "torchrun":
        with suppress(PermissionError):
            os.setpgid(0, 0)
        threading.Thread(target=end_with_parent, daemon=True).start()
        torch.set_num_threads(1)
    if (folder / "hosts").exists():
        namespace, address = json.loads((folder / "hosts").read_text())[rank]
        with Path(namespace).open() as file:
            os.setns(file.fileno(), os.CLONE_NEWNET)
        os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": "29500"}
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    (folder / f"pid{rank}").write_text(f"{os.getpid()}")
    terminal = os.open(folder / "terminal", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(terminal, 1)
    os.dup2(terminal, 2)
    if case.launcher == "patient":
        os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / f"error{rank}")
    sys.argv[0] = "pretrain_gpt.py"
    _note_program(folder / f"program{rank}")
    if fault.waits:
        _shorten_timeout()
    if rank == case.rank:
        fault.arm(case, folder)
    command = f"{RUN} {FEATURES[case.features].flags} --save FOLDER/saved {fault.flags} {flags}"
    if _saved(folder):
        command += " --load FOLDER/saved"

    def main(argv: Sequence[str]) -> int:
        record = recorded(lambda: _succeed(pretrain_gpt.main(argv)), awaits_search=False)
        (folder / f"record{rank}").write_text(json.dumps(asdict(record)))
        return 0

    leaving.run(main, shlex.split(command.replace("FOLDER", str(folder))))


def _succeed(code: int) -> None:
    if code:
        sys.exit(code)


def _note_program(file: Path) -> None:
    """Write the actions of the last iteration to a file."""
    from megatron.fold3d.runtime import executor

    def note(_: Any, iteration: Any) -> None:
        if _iteration() == ITERATIONS:
            file.write_text("\n".join(map(str, iteration.program)))

    watch(executor, "_table", note)


def _iteration() -> int:
    """Return the number of the iteration that runs, from 1."""
    from megatron.training import get_args

    return int(get_args().curr_iteration) + 1


def _shorten_timeout() -> None:
    """Let transfers time out sooner than Megatron's flag can say, which counts in minutes."""
    from megatron.core import parallel_state
    from megatron.training import initialize

    import fold3d_patches
    from megatron.fold3d.runtime.preemption import communicator

    for module in (initialize, parallel_state, communicator, fold3d_patches):
        module.timedelta = lambda minutes: timedelta(seconds=TIMEOUT_S)


def _left(folder: Path) -> list[str]:
    """Return what processes of a job's ranks are still there a few seconds after it has ended."""
    groups = {int(path.read_text()) for path in folder.glob("pid*")}
    end_s = time.monotonic() + 5.0
    while (found := [*_processes(groups)]) and time.monotonic() < end_s:
        time.sleep(0.05)
    return found


def _processes(groups: set[int]) -> Iterator[str]:
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            state, _, group = (path / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(group) in groups and state not in "ZX":
                yield (path / "cmdline").read_text().replace("\0", " ")


def _shared_memory() -> set[Path]:
    return set(Path("/dev/shm").iterdir())


def _abandoned(before: set[Path]) -> set[Path]:
    """Return what is new in shared memory, and used by no process."""
    gc.collect()
    if not (new := _shared_memory() - before):
        return new
    used = set()  # inodes: a semaphore is mapped under another name
    for path in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it has ended
            used |= {int(i) for i in re.findall(r" (\d+) +/dev/shm/", path.read_text())}
    return {path for path in new if path.exists() and path.stat().st_ino not in used}


def _saved(folder: Path) -> int:
    """Return the iteration of the last complete checkpoint, 0 without one."""
    with suppress(FileNotFoundError, ValueError):
        return int((folder / "saved" / TRACKER).read_text())
    return 0


def _set_tracker(folder: Path, iteration: int) -> None:
    (folder / "saved" / TRACKER).write_text(f"{iteration}")


LAST = slice(-1, None)
WORD = re.compile(r"error: the first to (?:fail|notice) was rank \d+", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Condition:
    """What happens to a rank, when, and how its job ends.

    Attributes:
        meet: makes it happen, in the rank's process; takes the job's folder.
        code: exit code of the rank.
        where: the ranks that can meet it.
        is_harmless: the job goes on.
        loads: the job starts from a checkpoint.
        waits: others notice it when their transfers time out.
        is_anybodys: every rank may be named.
        stands: the rank does not end by itself.
        flags: of the job that meets it.
        resumed: flags of the job that goes on.
    """

    meet: Callable[[Path], object]
    code: int = 1
    where: slice = slice(None)
    is_harmless: bool = False
    loads: bool = False
    waits: bool = False
    is_anybodys: bool = False
    stands: bool = False
    flags: str = ""
    resumed: str = ""

    def launchers(self) -> Sequence[str]:
        """Return what can start a job that meets it: torchrun expects functions to return."""
        return LAUNCHERS if self.code and not self.is_harmless else ("patient",)

    @contextmanager
    def place(self, folder: Path) -> Iterator[None]:
        """Make what the job runs on."""
        yield

    def prepare(self, folder: Path) -> None:
        """Change a checkpoint before it is loaded."""

    def mend(self, folder: Path) -> None:
        """Do what a user does before he starts the job again."""

    def arm(self, case: Case, folder: Path) -> None:
        """Prepare this rank to meet it."""

    def untold(self, case: Case, ended: Ended) -> list[str]:
        """Return what is wrong with exit codes, and with what was said."""
        named = r"rank \d" if self.is_anybodys else f"rank {case.rank}"
        if case.launcher == "torchrun":
            *_, last = ended.terminal.rpartition("Root Cause")
            is_one_of_these = self.is_anybodys or ended.cause == case.rank
            is_told = self.code <= 0 or re.search(named, last, re.IGNORECASE)
            return _wrong(
                {
                    f"torchrun names rank {ended.cause}": is_one_of_these,
                    f"exit codes {ended.codes}": ended.codes == {ended.cause: self.code},
                    "the last word does not name it": f"rank      : {ended.cause} " in last,
                    f"the last word does not say where {named} was": is_told,
                }
            )
        codes = dict.fromkeys(case.ranks, 1) | {case.rank: self.code}
        if self.stands:
            del codes[case.rank]
        spoken = len(WORD.findall(ended.terminal))
        last = (ended.terminal.strip().splitlines() or [""])[-1]
        is_filed = any(re.search(named, text) for text in ended.errors.values())
        return _wrong(
            {
                f"exit codes {ended.codes}": ended.codes == codes,
                f"the last word was spoken {spoken} times": spoken == 1,
                f"the last word is {last!r}": WORD.search(last) and re.search(named, last),
                "no traceback": "Traceback (most recent call last)" in ended.terminal,
                f"no error file names {named}: {ended.errors}": is_filed,
            }
        )


def _wrong(expected: Mapping[str, object]) -> list[str]:
    """Return what is said of each thing that is not as expected."""
    return [said for said, is_so in expected.items() if not is_so]


@dataclass(frozen=True, slots=True)
class Fault(Condition):
    """A condition at an action of the fifth iteration."""

    def arm(self, case: Case, folder: Path) -> None:
        from megatron.fold3d.runtime import executor

        make_table = executor._table

        def table(features: Any, iteration: Any) -> Any:
            handlers = make_table(features, iteration)
            if _iteration() != FAULTY:
                return handlers
            program = list(iteration.program)
            target = program[int(case.position * len(program) + 1e-6)]

            def handle(handler: Callable[[Any], None], action: Any) -> None:
                if action == target:
                    self.meet(folder)
                handler(action)

            return {op: partial(handle, handler) for op, handler in handlers.items()}

        executor._table = table


@dataclass(frozen=True, slots=True)
class Disputed(Fault):
    """A wrong result that Megatron saves a checkpoint for, to look for the device at fault."""

    code: int = 16
    where: slice = LAST
    resumed: str = "--rerun-mode disabled"

    def untold(self, case: Case, ended: Ended) -> list[str]:
        named = f"Unexpected result nan on rank {case.rank} "
        return _wrong(
            {
                f"exit codes {ended.codes}": set(ended.codes.values()) == {self.code},
                "nobody names the rank": named in ended.terminal,
            }
        )


@dataclass(frozen=True, slots=True)
class OnDisk(Fault):
    """A fault of the disk that the checkpoints are on, which all ranks share."""

    is_anybodys: bool = True

    @contextmanager
    def place(self, folder: Path) -> Iterator[None]:
        (folder / "saved").mkdir()
        options = f"size={DISK}"
        mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder / "saved")]
        subprocess.run(mount, check=True)
        try:
            yield
        finally:
            subprocess.run(["umount", "--lazy", str(folder / "saved")], check=True)

    def mend(self, folder: Path) -> None:
        subprocess.run(["mount", "-o", "remount,rw", str(folder / "saved")], check=True)
        with suppress(FileNotFoundError):
            (folder / "saved" / "filler").unlink()


@dataclass(frozen=True, slots=True)
class OnLink(Fault):
    """A fault of the rank's cable, in seconds; each rank is on a host of a testbed."""

    for_s: float = math.inf

    def launchers(self) -> Sequence[str]:
        return ("patient",)  # torchrun's store would be on none of the hosts

    @contextmanager
    def place(self, folder: Path) -> Iterator[None]:
        over = threading.Event()

        def cut() -> None:
            while not (folder / "cut").exists():
                if over.wait(0.005):
                    return
            with bed.cut(int((folder / "cut").read_text())):
                (folder / "cut").unlink()
                over.wait(None if self.for_s == math.inf else self.for_s)

        with Testbed(4, Link()) as bed, ThreadPoolExecutor(1) as pool:
            hosts = [[bed.namespace(host), bed.address(0)] for host in range(4)]
            (folder / "hosts").write_text(json.dumps(hosts))
            cable = pool.submit(cut)
            try:
                yield
            finally:
                over.set()
                cable.result()

    def mend(self, folder: Path) -> None:
        (folder / "hosts").unlink()

    def untold(self, case: Case, ended: Ended) -> list[str]:
        """Return what is wrong: who reaches no store speaks too; rank 0's host has it."""
        most = 2 if case.rank else len(case.ranks)
        spoken = len(WORD.findall(ended.terminal))
        return _wrong(
            {
                f"exit codes {ended.codes}": ended.codes == dict.fromkeys(case.ranks, 1),
                f"the last word was spoken {spoken} times": 1 <= spoken <= most,
                f"error files of ranks {[*ended.errors]}": [*ended.errors] == [*case.ranks],
            }
        )


@dataclass(frozen=True, slots=True)
class AtSave(Condition):
    """A condition behind the tensors of the second checkpoint, before its tracker."""

    def arm(self, case: Case, folder: Path) -> None:
        from megatron.training import checkpointing

        def meet(*_: Any, **__: Any) -> None:
            if _iteration() == LAST_SAVED:
                self.meet(folder)

        watch(checkpointing.dist_checkpointing, "save", after=meet)


@dataclass(frozen=True, slots=True)
class WithinSave(Condition):
    """A condition as soon as the second checkpoint has a file."""

    def arm(self, case: Case, folder: Path) -> None:
        def watch() -> None:
            checkpoint = folder / "saved" / f"iter_{LAST_SAVED:07}"
            while not (checkpoint.exists() and any(checkpoint.iterdir())):
                time.sleep(0.0002)
            self.meet(folder)

        threading.Thread(target=watch, daemon=True).start()


@dataclass(frozen=True, slots=True)
class AtStart(Condition):
    """A condition as a job that loads a checkpoint first calls a function of a module."""

    loads: bool = True
    at: tuple[str, str] = ("", "")

    def arm(self, case: Case, folder: Path) -> None:
        module, name = self.at
        watch(import_module(module), name, lambda *_, **__: self.meet(folder))


@dataclass(frozen=True, slots=True)
class BrokenShard(Condition):
    """The shards of the last checkpoint are cut off in their middle; the one before is whole."""

    loads: bool = True
    is_anybodys: bool = True
    where: slice = slice(1)

    def prepare(self, folder: Path) -> None:
        for shard in (folder / "saved" / f"iter_{LAST_SAVED:07}").glob("*.distcp"):
            os.truncate(shard, shard.stat().st_size // 2)

    def mend(self, folder: Path) -> None:
        _set_tracker(folder, SAVE_INTERVAL)


def _kill(with_signal: signal.Signals, _: Path) -> None:
    os.kill(os.getpid(), with_signal)


def _leave(_: Path) -> None:
    sys.exit(0)


def _stop_for_a_while(_: Path) -> None:
    subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def _close_sockets(_: Path) -> None:
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if stat.S_ISSOCK(path.stat().st_mode):
                with socket.socket(fileno=os.dup(int(path.name))) as other:
                    other.getpeername()  # an OSError of one that listens
                    if other.family in (socket.AF_INET, socket.AF_INET6):
                        other.shutdown(socket.SHUT_RDWR)


def _exhaust_memory(_: Path) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.ones(1 << 30)


def _fill_disk(folder: Path) -> None:
    with suppress(OSError), (folder / "saved" / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def _make_read_only(folder: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(folder / "saved")], check=True)


def _cut_cable(folder: Path) -> None:
    (folder / "cut.new").write_text(os.environ["RANK"])
    (folder / "cut.new").rename(folder / "cut")
    while (folder / "cut").exists():
        time.sleep(0.005)


def _spoil_loss(_: Path) -> None:
    from megatron.fold3d.training import gpt

    def spoil(batch: dict[str, Any], *_: Any) -> None:
        if batch.get("loss_mask") is not None:
            batch["loss_mask"] = batch["loss_mask"] * float("nan")

    watch(gpt, "get_batch", after=spoil)


def _jump_clock(by_s: float, _: Path) -> None:
    clock = time.time
    time.time = lambda: clock() + by_s


def _nothing(_: Path) -> None:
    pass


NOTHING = "nothing"
_SIGKILL = partial(_kill, signal.SIGKILL)
FAULTS: Mapping[str, Condition] = {
    "SIGKILL": Fault(_SIGKILL, code=-9),
    "SIGTERM": Fault(partial(_kill, signal.SIGTERM), code=-15),
    "leaves": Fault(_leave, code=0, is_anybodys=True),
    "SIGSTOP": Fault(partial(_kill, signal.SIGSTOP), waits=True, is_anybodys=True, stands=True),
    "SIGSTOP for 1 s": Fault(_stop_for_a_while, is_harmless=True),
    "closed sockets": Fault(_close_sockets, is_anybodys=True),
    "out of memory": Fault(_exhaust_memory),
    "NaN in a batch": Fault(_spoil_loss, where=LAST, flags="--rerun-mode disabled"),
    "NaN that is disputed": Disputed(_spoil_loss),
    "full disk": OnDisk(_fill_disk),
    "read-only folder": OnDisk(_make_read_only),
    "stalled link": OnLink(_cut_cable, for_s=2.0, is_harmless=True),
    "cut link": OnLink(_cut_cable, waits=True),
    "clock set back": Fault(partial(_jump_clock, -7200.0), is_harmless=True),
    "clock set forward": Fault(partial(_jump_clock, 7200.0), is_harmless=True),
    "killed within a save": WithinSave(_SIGKILL, code=-9),
    "killed behind a save": AtSave(_SIGKILL, code=-9),
    # The others wait in torch's store.
    "killed as groups are made": AtStart(
        _SIGKILL, code=-9, waits=True, at=("torch.distributed", "new_group")
    ),
    "killed at a load": AtStart(_SIGKILL, code=-9, at=("megatron.core.dist_checkpointing", "load")),
    "broken shards": BrokenShard(_nothing),
}
CONDITIONS = {**FAULTS, NOTHING: Condition(_nothing, is_harmless=True)}


def main() -> int:
    """Sweep for some minutes; returns 1 if a case was not as it should be."""
    parser = options(__doc__, "faults.jsonl")
    parser.add_argument("--only", default="", help="words that a case has, separated by commas")
    args = parser.parse_args()
    end_s = time.monotonic() + 60 * args.minutes
    order = cases()
    print(f"{len(order)} cases", flush=True)
    random.Random(args.seed).shuffle(order)
    words = [word.strip() for word in args.only.split(",")]
    order = [case for case in order if all(word in str(case) for word in words)]
    counts: Counter[str] = Counter()
    for number, case in until(end_s, enumerate(order[args.first :], args.first)):
        found = problems(case)
        counts["wrong" if found else "right"] += 1
        append(args.log, seed=args.seed, number=number, case=str(case), found=found)
        if found:
            print(f"{number}: {case}:", *found, sep="\n", flush=True)
    print(f"seed {args.seed}, cases from {args.first} on: {dict(counts)}")
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
