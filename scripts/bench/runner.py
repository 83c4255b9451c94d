"""Run one variant of a job on a testbed, once, and count what its timed iterations cost."""

import atexit
import gc
import importlib
import logging
import os
import re
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron.fold3d.observe import training_log
from scripts.bench.processes import Ranks
from scripts.bench.summary import Run
from scripts.bench.testbed import Link, Testbed, Traffic
from scripts.bench.variants import Job, Variant


def paced(forward_ms: float, backward_ms: float) -> tuple[str, ...]:
    """Return the flags of a rank whose layers are paced, and whose collectives are as NCCL's."""
    return (f"--forward-ms={forward_ms}", f"--backward-ms={backward_ms}", "--nccl-order")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """How the job runs here: links, clocks, and where logs go."""

    job: Job
    link: Link | None  # None: ranks talk over this machine's loopback
    rank_flags: tuple[str, ...]
    logs: Path
    warmup: int = 2
    real_time: bool = False
    timeout_s: float = 300.0

    def measured(
        self, variant: Variant, number: int = 1, progress: Callable[[int], None] = lambda _: None
    ) -> Run:
        """Run a variant once.

        Raises:
            ValueError: it failed.
        """
        run = self.run(variant, number, progress)
        if run.failure:
            raise ValueError(f"{variant.name}: {run.failure}")
        return run

    def run(
        self, variant: Variant, number: int, progress: Callable[[int], None] = lambda _: None
    ) -> Run:
        """Run a variant once; round 0 is the one without shaped links.

        ``progress`` is told again and again how many iterations are over.
        """
        link = self.link
        if link is not None and not number:
            link = Link(delay_ms=link.delay_ms)
        logs = self.logs / f"{variant.name}-round{number}"
        shutil.rmtree(logs, ignore_errors=True)
        argv = [*self.rank_flags, "--", *self.job.flags(), *variant.flags]
        clock = _CpuClock()
        with Testbed(self.job.world_size, link) as testbed:
            ranks = testbed.fork(partial(_train, argv, variant.checkout), logs)
            timed = (self.warmup, self.job.num_iterations)
            meter = _Meter(testbed, ranks, timed, self.real_time, progress)
            codes = ranks.wait(self.timeout_s, meter.watch)
            link_bytes = meter.busiest_bytes()
        other_cpus = clock.other_cpus()
        if any(code != 0 for code in codes):
            return Run(variant=variant, round=number, failure=_failure(codes, ranks.logs))
        iterations = training_log.parse(ranks.logs[-1].read_text(errors="replace"))
        chosen = training_log.chosen_after(ranks.logs[0].read_text(errors="replace"))
        chose_late = self.warmup < chosen < len(iterations)
        return Run(
            variant=variant,
            round=number,
            iterations=tuple(iterations),
            warmup=chosen if chose_late else self.warmup,
            link_bytes=link_bytes / (self.job.num_iterations - self.warmup),
            other_cpus=other_cpus,
        )


def _train(argv: Sequence[str], checkout: Path | None) -> int:
    """Be one rank; see `preload`. One of another commit imports all that it needs itself."""
    if checkout is not None:
        os.environ["OMP_NUM_THREADS"] = "1"
        os.chdir(checkout)
        python = str(checkout / ".venv/bin/python")
        os.execv(python, [python, "-m", "scripts.bench.rank", *argv])

    import torch

    from scripts.bench import rank

    torch.set_num_threads(1)
    sys.argv = [rank.__file__]
    return rank.main(argv)


def preload() -> None:
    """Import once what every rank of every run needs; nothing of it starts a thread."""
    warnings.simplefilter("ignore")
    # wandb, which Megatron imports, leaves temporary folders; ranks end without this.
    tempfile.tempdir = tempfile.mkdtemp(prefix="fold3d-bench-")
    atexit.register(shutil.rmtree, tempfile.tempdir, ignore_errors=True)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # that there is no GPU
    for module in ("megatron.core.tokenizers.text", "megatron.training.training"):
        importlib.import_module(module)
    for module in ("megatron.fold3d.runtime.executor", "scripts.bench.rank"):
        importlib.import_module(module)
    gc.freeze()  # else a collection in a rank would copy the pages that it shares


class _Meter:
    """Counts what the timed iterations put on the links, and clears the CPUs for them."""

    def __init__(
        self,
        testbed: Testbed,
        ranks: Ranks,
        timed: tuple[int, int],
        real_time: bool,
        progress: Callable[[int], None],
    ) -> None:
        self._testbed, self._ranks, self._progress = testbed, ranks, progress
        self._timed, self._real_time = timed, real_time
        self._readings: list[list[Traffic]] = []

    def watch(self) -> None:
        """Read the counters as soon as the log says that the warm-up, or the last, is over.

        What follows the last iteration, gathering parameters for instance, is not of it.
        """
        log = self._ranks.logs[-1]  # the last rank's is Megatron's
        num_iterations = len(training_log.parse(log.read_text(errors="replace")))
        self._progress(num_iterations)
        if len(self._readings) == len(self._timed):
            return
        if num_iterations and self._real_time:  # not before: starting takes seconds of CPU
            self._ranks.hurry()
            self._real_time = False
        if num_iterations >= self._timed[len(self._readings)]:
            self._readings.append(self._testbed.traffic())

    def busiest_bytes(self) -> int:
        """Bytes of the timed iterations over the busiest link, in its busier direction."""
        if not self._readings:
            return 0
        start, end = (*self._readings, self._testbed.traffic())[:2]
        hosts = zip(start, end, strict=True)
        return max(after - before for host in hosts for before, after in zip(*host, strict=True))


class _CpuClock:
    """How busy other processes keep this machine; ours are its finished children."""

    def __init__(self) -> None:
        self._start = self._read()

    def other_cpus(self) -> float:
        """Mean number of CPUs that others have used since."""
        wall_s, others_s = (
            now - start for now, start in zip(self._read(), self._start, strict=True)
        )
        return max(0.0, others_s / wall_s)

    @staticmethod
    def _read() -> tuple[float, float]:
        ticks = [int(word) for word in Path("/proc/stat").read_text().split(maxsplit=4)[1:4]]
        ours = resource.getrusage(resource.RUSAGE_CHILDREN)
        busy_s = sum(ticks) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), busy_s - ours.ru_utime - ours.ru_stime


def _failure(codes: Sequence[int | None], logs: Sequence[Path]) -> str:
    """Say which rank failed first, as far as can be told, and with what last words."""
    failed = [rank for rank, code in enumerate(codes) if code]
    if not failed:
        return f"not over in time; logs in {logs[0].parent}"
    lines = logs[failed[0]].read_text(errors="replace").strip().splitlines()
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b|\S+: error:", line)]
    words = (errors or lines or [f"exit code {codes[failed[0]]}"])[-1]
    return f"rank {failed[0]}: {words} ({logs[failed[0]]})"
