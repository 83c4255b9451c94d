from megatron.fold3d.commands.console import Progress


def test_progress_says_how_much_is_done_and_how_much_there_may_be(capsys, monkeypatch):
    progress = Progress()
    progress(1, 905)
    assert not capsys.readouterr().err
    monkeypatch.setattr(progress, "_next_s", 0.0)
    progress(905, 925)
    progress(906, 906)
    assert capsys.readouterr().err == "simulated: 905 in 0 s, at most 20 to go\n"
