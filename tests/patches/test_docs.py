"""The page about patches lists what is patched, and nothing that is not."""

import re
from pathlib import Path

from tests.patches.test_upstream import NEVER_BESIDE_THESE, PATCHES

PAGE = Path(__file__).parents[2] / "docs" / "patches.md"


def test_the_page_has_one_row_per_patch_with_a_reason_and_an_end() -> None:
    rows = re.findall(r"^\| `([^`]*:[^`]*)` \| (.+) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    assert sorted(symbol for symbol, _, _ in rows) == sorted(
        patch.target for patch in (*PATCHES, *NEVER_BESIDE_THESE)
    )
