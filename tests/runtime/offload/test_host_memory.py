"""What the host has left is known, and asked before it is taken."""

import sys
from pathlib import Path

import pytest
import torch

from megatron.fold3d.plan.passes.offload import add_offload
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.runtime.offload import host_memory
from megatron.fold3d.runtime.offload.host_memory import HostMemoryError
from megatron.fold3d.runtime.offload.pinned_pool import PinnedPool
from tests.programs import ran

PLAN = add_offload(build("afab", num_ranks=2, num_segments=1, num_microbatches=10))
GIB = 1 << 30


def test_more_than_the_host_has_is_an_error_with_both_numbers(monkeypatch: pytest.MonkeyPatch):
    assert 0 < host_memory.available_bytes() < 1 << 50
    host_memory.check_node(PLAN, 1024, [0, 0, 1])
    of_all_ranks = f"^{(10 + 10 + 10) * 1024 * GIB:,} bytes of host memory for .* 3 ranks"
    with pytest.raises(HostMemoryError, match=of_all_ranks):
        host_memory.check_node(PLAN, 1024 * GIB, [0, 0, 1])
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 9)
    with pytest.raises(HostMemoryError, match=r"10 bytes .*, 9 are available; use fewer micro-"):
        host_memory.check(10, "for a test")


def test_slots_are_reused_first_in_first_out_and_taken_from_the_host_once():
    pool = PinnedPool(torch.device("cpu"))
    pool.reserve({512: 3})
    slots = [pool.take(500) for _ in range(3)]
    for slot in slots:
        pool.give_back(slot)
    assert [pool.take(512) for _ in range(3)] == slots
    assert (pool.num_bytes, pool.num_growths, pool.high_water_bytes) == (1536, 1, 1536)


def test_a_pinned_pool_gives_no_more_slots_than_it_has_and_grows_when_it_is_told_to():
    pool = PinnedPool(torch.device("cpu"))
    pool.reserve({512: 1})
    pool.take(512)
    assert pool.take(1) is None
    pool.reserve({512: 2})
    assert pool.take(1).numel() == 512
    assert pool.num_growths == 2
    with pytest.raises(HostMemoryError, match="are available"):
        pool.reserve({1 << 60: 1})


def test_memory_that_was_reserved_before_sizes_were_known_is_cut_into_slots():
    pool = PinnedPool(torch.device("cpu"))
    pool.reserve_bytes(2500)  # 5 x 512
    assert [pool.take(size).numel() for size in (1000, 512)] == [1024, 512]
    assert pool.take(1025) is None
    pool.reserve({512: 3, 1024: 1})
    assert (pool.num_bytes, pool.num_growths) == (2560, 1)  # the third was cut of what was left
    pool.reserve({512: 4, 1024: 1})
    assert (pool.num_bytes, pool.num_growths) == (3072, 2)


@pytest.mark.parametrize(
    ("own", "files"),
    [
        ("0::/job/step", ("", "memory.max", "memory.current", "inactive_file")),
        (
            "11:cpuset:/\n4:memory:/job/step\n0::/",
            ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_the_tightest_control_group_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, files: tuple[str, ...]
):
    folder, limit, used, reclaimable = files
    groups = [tmp_path / folder, tmp_path / folder / "job", tmp_path / folder / "job/step"]
    groups[-1].mkdir(parents=True)
    for group, limit_bytes in zip(groups, ("9000000", "5000", "7000"), strict=True):
        (group / limit).write_text(f"{limit_bytes}\n")
        (group / used).write_text("3000\n")
        (group / "memory.stat").write_text(f"cache 1\n{reclaimable} 500\n")
    (tmp_path / "own").write_text(f"{own}\n")
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path)
    monkeypatch.setattr(host_memory, "_OWN_GROUPS", tmp_path / "own")
    assert host_memory.available_bytes() == 5000 - 3000 + 500

    (groups[1] / limit).unlink()  # as a container sees it
    assert host_memory.available_bytes() == 7000 - 3000 + 500


def test_memory_that_was_taken_is_there_so_that_the_next_rank_counts_it():
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident_bytes()
    memory = host_memory.take(64 << 20, torch.device("cpu"))
    assert resident_bytes() - before > 60 << 20
    assert memory.numel() == 64 << 20


@pytest.mark.processes
def test_ranks_look_and_take_one_after_the_other():
    other = "import fcntl; fcntl.flock(open('/proc/meminfo'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    with host_memory._turn():
        assert "BlockingIOError" in ran(sys.executable, "-c", other).stderr
    assert ran(sys.executable, "-c", other).returncode == 0
