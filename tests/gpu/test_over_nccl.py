"""Over NCCL, too, every schedule and feature trains what stock Megatron trains, bit for bit.

The tables are those of `tests/end_to_end`. One GPU is enough: NCCL refuses two ranks of a host on a
GPU, so ranks that share it say that they are on hosts of their own, and are connected by sockets.
NVIDIA's MPS must run then: NCCL's kernels wait for those of other ranks. With a GPU for each rank
there is no need of it.
"""

import functools
import hashlib
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.fold3d.runtime.preemption.communicator import extension
from tests.distributed import run_distributed
from tests.end_to_end import (
    test_backward_share,
    test_codes,
    test_equal_to_stock,
    test_param_shards,
    test_replicated_optimizer,
)
from tests.end_to_end.training import Record, differences, train

pytestmark = pytest.mark.gpu

TABLES = (
    test_equal_to_stock,
    test_param_shards,
    test_replicated_optimizer,
    test_codes,
    test_backward_share,
)
# apex and Transformer Engine may be absent.
LOCAL = shlex.split(
    "--transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion "
    "--no-gradient-accumulation-fusion"
)
# A rank is alone on its host as far as NCCL can tell. The tensors are small: one channel will do.
SHARED = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_MAX_CTAS": "1",
    "NCCL_MNNVL_ENABLE": "0",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row of a table: both command lines, and a plan file's text for ``PLAN`` in ours."""

    name: str
    num_ranks: int
    ours: tuple[str, ...]
    stock: tuple[str, ...]
    plan: str = ""

    @property
    def queues(self) -> str:
        """``CUDA_DEVICE_MAX_CONNECTIONS``: what Megatron or the preemptive communicator demands."""
        if "--preemptive-comm" in self.ours:
            return "32"
        one = {"--tensor-model-parallel-size", "--context-parallel-size"}
        sizes = dict(zip(self.ours, self.ours[1:], strict=False))
        return "1" if any(sizes.get(flag, "1") != "1" for flag in one) else "8"


def cases() -> Iterator[Case]:
    """All rows, but for what needs Transformer Engine, as context parallelism does."""
    for module in TABLES:
        family = module.__name__.split(".test_")[1]
        for row in module.ROWS:
            if row.cp == 1 and row.reference is train:
                yield Case(
                    name=f"{family}: {row}",
                    num_ranks=row.num_ranks,
                    ours=row.command(row.ours),
                    stock=row.command(f"--schedule stock {row.stock}"),
                    plan=row.plan,
                )


def parameters() -> Iterator[Any]:
    """The cases; those with one reference are for one worker, which trains it once."""
    for case in cases():
        reference = hashlib.sha256(repr((case.queues, case.stock)).encode()).hexdigest()[:8]
        yield pytest.param(case, id=case.name, marks=pytest.mark.xdist_group(reference))


@pytest.mark.processes
@pytest.mark.parametrize("case", list(parameters()))
def test_losses_norms_and_parameters_are_those_of_stock(case: Case, tmp_path: Path) -> None:
    if "--preemptive-comm" in case.ours and extension() is None:
        pytest.skip("needs the extension: make extension")
    plan_file = tmp_path / "plan"
    plan_file.write_text(case.plan)
    ours = _train(
        case.num_ranks,
        case.queues,
        *(word.replace("PLAN", str(plan_file)) for word in case.ours),
    )
    stock = _reference(case.num_ranks, case.queues, *case.stock)
    found = differences(ours, stock)
    # Nobody knows the norm of a step that reaches into the next iteration when its own ends.
    assert [text for text in found if "grad norm: None instead" not in text] == []


@functools.cache
def _reference(num_ranks: int, queues: str, *argv: str) -> list[Record]:
    return _train(num_ranks, queues, *argv)


def _train(num_ranks: int, queues: str, *argv: str) -> list[Record]:
    flags = list(argv)
    at = flags.index("--device")
    flags[at : at + 2] = LOCAL
    # Or else torch starts CUDA in the server that forks the ranks.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    records: list[Record] = run_distributed(train_on_gpu, num_ranks, flags, queues, timeout_s=300)
    return records


def train_on_gpu(argv: Sequence[str], queues: str) -> Record:
    """Train on this rank's GPU, or on the one that is there."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = queues
    # cuBLAS promises equal bits only with this, where streams run at the same time.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    rank = int(os.environ["RANK"])
    if torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):
        os.environ.update(SHARED, NCCL_HOSTID=f"host-{rank}", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    return train(argv)
