"""Files of rows that cannot be read as a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gspo_megatron.data.prompts import load_prompts
from gspo_megatron.errors import DataError


def test_a_pipe_is_refused_because_rows_are_read_several_times(tmp_path: Path) -> None:
    """Without a writer, opening the pipe would wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe: a pipe, which can be read only once; give a file"):
        load_prompts(tmp_path / "pipe")
