"""Work that one rank does for all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_megatron.errors import UserError
from gspo_megatron.platform.collectives import on_main

pytestmark = pytest.mark.usefixtures("one_rank")


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(UserError, match=f"{missing}: No such file or directory"):
        on_main(missing.read_bytes)


def test_other_errors_keep_their_traceback() -> None:
    def fail() -> None:
        raise OSError("nothing that a user could mend")

    with pytest.raises(OSError, match="nothing"):
        on_main(fail)
