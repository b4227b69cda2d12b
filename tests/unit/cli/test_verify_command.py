"""What `verify` refuses before it starts a rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_megatron.cli.main import main
from tests.unit.cli.conftest import ConfigWriter

LAYOUT = ("--layouts", "tp=1")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--checkpoint", "somewhere"), "--checkpoint: nothing reads it without --from-dump"),
        (("--from-dump", "nowhere"), "nowhere: no such folder"),
        (("--from-dump", "empty"), "empty: manifest.json: missing"),
    ],
)
def test_what_is_no_dump_is_refused(
    write_config: ConfigWriter,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert main(["verify", str(write_config()), *words, *LAYOUT]) == 2
    assert said in capsys.readouterr().err
