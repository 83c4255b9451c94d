"""What is printed before a run can begin, and where it is logged from then on."""

import logging
import sys
from contextlib import suppress

import pytest

from megatron.fold3d.training.launch import held_log


@pytest.fixture
def handlers():
    root = logging.getLogger()
    before = list(root.handlers)
    yield root.handlers
    root.handlers[:] = before


def test_a_handler_made_while_the_log_is_held_logs_to_the_terminal(
    handlers: list[logging.Handler], capsys: pytest.CaptureFixture[str]
):
    with held_log():
        sys.stdout.write("flags\n")
        # As `megatron.training` does when it is imported.
        handlers[:] = [logging.StreamHandler(sys.stdout)]
        logging.getLogger("megatron").warning("before")
        assert capsys.readouterr().out == ""
    assert capsys.readouterr().out == "flags\nbefore\n"
    logging.getLogger("megatron").warning("of the run")
    assert capsys.readouterr().out == "of the run\n"


@pytest.mark.parametrize(
    ("ending", "printed"),
    [(None, "flags\n"), (SystemExit(0), "flags\n"), (ValueError("--lr is missing"), "")],
)
def test_what_megatron_prints_waits_until_a_run_can_begin(
    capsys: pytest.CaptureFixture[str], ending: BaseException | None, printed: str
):
    with suppress(SystemExit, ValueError), held_log():
        sys.stdout.write("flags\n")
        assert capsys.readouterr().out == ""
        if ending is not None:
            raise ending
    assert capsys.readouterr().out == printed
