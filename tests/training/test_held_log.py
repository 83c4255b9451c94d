"""What is printed before a run can begin, and where it is logged from then on."""

import logging
import sys

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


def test_of_a_mistake_nothing_else_is_printed(capsys: pytest.CaptureFixture[str]):
    def mistake() -> None:
        with held_log():
            sys.stdout.write("flags\n")
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        mistake()
    assert capsys.readouterr().out == ""
