"""What `make check` says of pages that are too long."""

from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import check_prose
from scripts.check_prose import problems, sentences

type Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return what writes a page of a folder that has four pages, each of a word."""
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "CONTRIBUTING.md", "docs/flags.md", "docs/slurm.md"):
        (tmp_path / name).write_text("Word.\n")
    monkeypatch.setattr(check_prose, "EXCEPTIONS", ())
    return lambda name, text: (tmp_path / name).write_text(text) and None


def test_a_sentence_ends_at_a_full_stop_an_item_a_cell_or_a_heading():
    page = """# One

Two is `a. B` here. Three: ok? [Four](x.md#y) is
on two lines.

- Five
- Six

| seven | eight |
|---|---|

```sh
no sentence. At all.
```

    fold3d has \\
        --none. At all

Nine.
"""
    assert [s for s in sentences(page) if s.strip("|-")] == [
        *("One", "Two is CODE here.", "Three: ok?", "Four is on two lines."),
        *("Five", "Six", "seven", "eight", "Nine."),
    ]


def test_each_limit_is_named_with_what_was_found(write, tmp_path, monkeypatch):
    write("README.md", "Word. " * 1301)
    write("docs/slurm.md", "Long " + "word " * 35)
    monkeypatch.setattr(check_prose, "ALL_WORDS", 1300)
    monkeypatch.setattr(check_prose, "EXCEPTIONS", ("Short",))
    readme, everything, sentence, unused = problems(tmp_path)
    assert readme.startswith("README.md has 1301 words, of at most 1300; ")
    assert "docs/*.md have 1339 words, of at most 1300; " in everything
    assert sentence.startswith(
        "docs/slurm.md: a sentence of 36 words, of at most 35; split it: Long"
    )
    assert unused == "EXCEPTIONS names no long sentence: 'Short'; drop it"


def test_a_sentence_may_be_an_exception_but_not_more_than_ten(write, tmp_path, monkeypatch):
    write("docs/slurm.md", "Long " + "word " * 35)
    monkeypatch.setattr(check_prose, "EXCEPTIONS", ("Long word",))
    assert list(problems(tmp_path)) == []
    monkeypatch.setattr(check_prose, "EXCEPTIONS", ("Long word",) * 11)
    assert list(problems(tmp_path)) == ["EXCEPTIONS has 11 sentences, of at most 10; split some"]
