"""What `verify` refuses before it starts a rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_megatron.cli import launch
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


@pytest.mark.parametrize("value", ["nan", "-1", "inf", "much"])
def test_a_tolerance_is_a_number_from_0(
    write_config: ConfigWriter, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["verify", str(write_config()), f"--tolerance={value}", *LAYOUT])
    assert caught.value.code == 2
    assert f"{value!r} is not a number from 0" in capsys.readouterr().err


def test_a_layout_for_a_cluster_is_not_started_here_by_itself(
    write_config: ConfigWriter, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(write_config()), "parallel.layout=dp=4096"]) == 2
    assert "layout dp=4096: takes 4096 ranks, which is much" in capsys.readouterr().err


def test_it_is_no_rank_of_anything(
    write_config: ConfigWriter,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert main(["verify", str(write_config()), *LAYOUT]) == 2
    assert "start it once, outside torchrun and srun" in capsys.readouterr().err


def test_a_signal_to_it_is_no_failure_of_a_layout(
    write_config: ConfigWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "launch", lambda *_, **__: 130)
    with pytest.raises(SystemExit) as caught:
        main(["verify", str(write_config()), *LAYOUT])
    assert caught.value.code == 130
