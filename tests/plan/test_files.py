from pathlib import Path

import pytest

from megatron.fold3d.plan import files
from megatron.fold3d.plan.files import parse_plan, read_plan
from megatron.fold3d.plan.ir import Plan, PlanError

TEXT = "0F0 0B0\n1F0 1B0\n"
PLAN = Plan.from_text(TEXT)


@pytest.mark.parametrize(
    "content",
    [
        TEXT,
        "0F0,0B0\n1F0,1B0\n",
        "0F0,,,0B0\n,1F0,1B0,\n",
        '{"ranks": 2, "programs": [["0F0", "0B0"], ["1F0", "1B0"]]}',
        '\n {"programs": [["0F0", "0B0"], ["1F0", "1B0"]]}\n',
        "# first, and a comma\n0F0 0B0\n1F0 1B0",
        "# a table, with a comment\n0F0,0B0\n1F0,1B0",
        "\ufeff" + TEXT,
        TEXT.replace("\n", "\r\n"),
    ],
)
def test_a_plan_is_read_from_text_tables_and_json(content: str):
    assert parse_plan(content.encode()) == PLAN


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "at least one rank and one action"),
        (b"\x7fELF\xff\x00", "not text; a plan file is what `fold3d plan` writes"),
        (TEXT.encode("utf-16"), "not text"),
        (b"\x00\x00\x00", "is not an action"),
        (b"0F0;0B0", "'0F0;0B0' is not an action"),
        (b'"0F0,0B0', "is not an action"),
        (200_000 * b"x" + b",", "not a table of actions: field larger than field limit"),
        (b"{", "JSON without readable programs"),
        (b"{}", r"JSON without readable programs \(KeyError: 'programs'\)"),
        (b'{"programs": 3}', "JSON without readable programs"),
        (b'{"programs": [[0]]}', "JSON without readable programs"),
        (b'{"programs": [["0G0"]]}', "rank 0: '0G0' is not an action"),
        (b'{"a":' * 100_000, "JSON without readable programs"),
    ],
)
def test_what_is_no_plan_is_refused_with_the_reason(content: bytes, message: str):
    with pytest.raises(PlanError, match=message):
        parse_plan(content)


def test_the_error_names_the_file(tmp_path: Path):
    path = tmp_path / "plan.txt"
    path.write_text("0F0 0X0")
    with pytest.raises(PlanError, match=f"^{path}: rank 0: '0X0' is not an action"):
        read_plan(path)


def test_a_file_without_end_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "MOST_BYTES", 1000)
    with pytest.raises(ValueError, match=r"^/dev/zero: longer than 1000 bytes"):
        read_plan(Path("/dev/zero"))
