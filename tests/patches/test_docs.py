"""The documentation lists each symbol that is patched, and each patch says why and until when."""

import ast
import re
from pathlib import Path

from fold3d_patches import parsed_once
from fold3d_patches.schedule import finished_sums
from megatron.fold3d.upstream import versions
from scripts import try_versions
from tests.patches.test_upstream import PATCHES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "compatibility.md"


def test_the_page_names_each_patch_and_no_other() -> None:
    section = PAGE.read_text().split("## Patches")[1]
    symbols = [
        re.sub(r"(?<=:ProcessGroup\.)\w+", lambda name: versions.collective(name[0]), symbol)
        for symbol in re.findall(r"`([\w.]+:[\w.]+)`", section)
    ]
    of_older = (*parsed_once.PATCHES, *finished_sums.PATCHES)
    assert {*symbols} == {patch.target for patch in (*PATCHES, *of_older)}


def test_the_page_has_the_pairs_that_were_tried() -> None:
    assert try_versions.printed(PAGE.read_text()) == PAGE.read_text()


def test_each_patch_says_why_what_changes_and_when_it_can_go() -> None:
    for file in {*(ROOT / "fold3d_patches").rglob("*.py")} - {ROOT / "fold3d_patches/registry.py"}:
        if re.search(r"\b(Patch|replace)\(", file.read_text()):
            told = ast.get_docstring(ast.parse(file.read_text())) or ""
            parts = ("Why:", "Change:", "Remove when:")
            assert [part for part in parts if f"\n{part}" not in told] == [], file
