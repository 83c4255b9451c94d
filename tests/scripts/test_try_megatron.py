"""Another version of Megatron-core is named, and one that is not there is an error."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts import try_megatron


def test_a_folder_without_megatron_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert try_megatron.main(["--folder", str(tmp_path)]) == 2
    assert f"no megatron/core/package_info.py in {tmp_path}" in capsys.readouterr().err


def test_the_version_is_that_of_the_folder(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    info = tmp_path / "megatron/core/package_info.py"
    info.parent.mkdir(parents=True)
    info.write_text("__version__ = '0.20.0rc1'\n")
    monkeypatch.setattr(
        try_megatron,
        "python",
        lambda tree, folders, command: SimpleNamespace(returncode=int(command[-1] != "--inside")),
    )
    assert try_megatron.main(["--folder", str(tmp_path)]) == 1  # patches fit, a test failed
    assert try_megatron.main(["--folder", str(tmp_path), "--patches-only"]) == 0
    assert capfd.readouterr().out == "megatron-core 0.20.0rc1\n" * 2
