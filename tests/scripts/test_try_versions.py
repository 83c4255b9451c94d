"""A copy of the work tree is pinned to a pair, and its ranges are widened for what they exclude."""

import re
import shutil
from pathlib import Path

import pytest

from scripts import try_versions

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("package", "version", "pin", "allowed"),
    [
        ("torch", "2.9.1", "==2.9.1", ">=2.9.0a0,<2.16"),
        ("torch", "2.16.0", "==2.16.0", ">=0.dev0"),
        ("megatron-core", "0.17.1", "==0.17.1", ">=0.17.1,<0.20"),
        ("megatron-core", "0.20.0rc1", "==0.20.0rc1", ">=0.dev0"),
        ("megatron-core", ">=0.dev0", ">=0.dev0", ">=0.dev0"),  # the newest
    ],
)
def test_a_copy_is_pinned_to_a_version(tmp_path, package, version, pin, allowed):
    for name in ("pyproject.toml", try_versions.VERSIONS):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    try_versions._pin(tmp_path, package, version)
    project = (tmp_path / "pyproject.toml").read_text()
    found = re.findall(rf'"{package}(?:\[training\])?([=>][^"]+)"', project)
    assert found == [allowed, pin]
    ours = (tmp_path / try_versions.VERSIONS).read_text()
    assert (f'MEGATRON = "{allowed}"' in ours) == (package == "megatron-core")


def test_what_is_left_out_stays_as_it_is(tmp_path: Path):
    try_versions._pin(tmp_path, "torch", "")
    assert not [*tmp_path.iterdir()]
