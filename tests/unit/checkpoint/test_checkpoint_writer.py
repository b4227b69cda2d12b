"""Room for a checkpoint."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from gspo_megatron.checkpoint import writer as checkpoint_writer
from gspo_megatron.checkpoint.writer import CheckpointWriter
from tests.unit.models.one_rank import tiny_policy

pytestmark = pytest.mark.usefixtures("one_rank")


def test_room_that_a_removal_is_making_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    surplus = tmp_path / ".partial-surplus"
    surplus.mkdir()

    def remove_slowly(paths: Sequence[Path]) -> None:
        time.sleep(0.3)
        for path in paths:
            shutil.rmtree(path)

    monkeypatch.setattr(checkpoint_writer, "_remove", remove_slowly)
    monkeypatch.setattr(checkpoint_writer, "free_bytes", lambda _: 0 if surplus.exists() else 1e12)
    writer = CheckpointWriter(tmp_path, tiny_policy())
    writer.remove([surplus])
    published: list[Path] = []
    refusal = writer.begin("new", None, lambda _: None, published.append, asynchronous=False)
    assert refusal is None and writer.finish() is None
    assert published == [tmp_path / "new"]

    surplus.mkdir()  # and nobody removes it
    refusal = writer.begin("newer", None, lambda _: None, published.append, asynchronous=False)
    assert refusal is not None and "0 are free" in refusal
