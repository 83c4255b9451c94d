from contextlib import suppress

from megatron.fold3d.commands.console import Progress


def test_progress_into_a_file_ends_with_a_line_that_says_so(capsys, monkeypatch):
    monkeypatch.setattr(Progress, "DELAY_S", 0.0)
    with Progress("simulated", "no other can be faster") as progress:
        progress(1, 905)
        progress(60, 905)
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "simulated: 1 of about 905, about 0 s left",
        "simulated: 60, done; no other can be faster",
    ]


def test_progress_that_is_broken_off_does_not_say_that_it_is_done(capsys, monkeypatch):
    monkeypatch.setattr(Progress, "DELAY_S", 0.0)

    def interrupted() -> None:
        with Progress("simulated", "") as progress:
            progress(1, 905)
            raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        interrupted()
    assert capsys.readouterr().err == "simulated: 1 of about 905, about 0 s left\n"
