"""The C++ scheduler and the coder under sanitizers; `csrc/tests` says what is claimed."""

import re
import shutil
from pathlib import Path

import pytest

from tests.programs import printed

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler"),
]


@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_they_keep_their_promises_without_races_or_leaks(sanitizer: str, tmp_path: Path):
    make = ("make", "-s", "-j2", "-C", "csrc", f"SANITIZER={sanitizer}", f"OUT={tmp_path}")
    assert printed(*make).count(": ok") == 32


@pytest.mark.alone
def test_a_slice_that_was_held_back_starts_within_a_tenth_of_a_millisecond(tmp_path: Path):
    said = printed("make", "-s", "-C", "csrc", "wake", f"OUT={tmp_path}")
    assert float(re.search(r"p50 ([\d.]+) us", said)[1]) < 100  # 99 of 100 need a quiet machine
