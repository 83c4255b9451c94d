from megatron.fold3d.commands.console import Progress


def test_progress_says_how_much_is_done_and_when_the_rest_will_be(capsys, monkeypatch):
    progress = Progress("simulated")
    progress(1, 905)
    assert not capsys.readouterr().err
    monkeypatch.setattr(progress, "_next_s", 0.0)
    progress(905, 905)
    progress(906, 906)
    assert capsys.readouterr().err == "simulated: 905 of about 905, about 0 s left\n"
