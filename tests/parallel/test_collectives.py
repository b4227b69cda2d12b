"""Work that one rank does for all ranks, and the error that the other ranks get if this work
fails."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from gspo_megatron import errors
from gspo_megatron.errors import ConfigError, UserError
from gspo_megatron.platform.collectives import on_main
from tests.parallel.pool import Pool


class UnknownError(UserError):
    """An error whose class other processes may not know."""


def failure(kind: str) -> tuple[str, str, list[str]]:
    """The error that a rank gets if rank 0 raises an error of this kind."""

    def fail() -> None:
        assert dist.get_rank() == 0, "work of rank 0"
        if kind == "ConfigError":
            raise ConfigError(["one line", "and another"])
        raise getattr(errors, kind, UnknownError)("one line\nand another")

    try:
        on_main(fail)
    except UserError as error:
        return type(error).__name__, str(error), getattr(error, "problems", [])
    raise AssertionError("no rank may go on")


@pytest.mark.parametrize(
    "kind", ["ConfigError", "DataError", "EpisodeError", "RewardError", "RolloutError", "UserError"]
)
def test_all_ranks_have_an_error_of_the_same_class(pool: Pool, kind: str) -> None:
    """After errors of some classes the run is saved, and all ranks must take part in that."""
    problems = ["one line", "and another"] if kind == "ConfigError" else []
    assert pool.run(3, failure, kind=kind) == [(kind, "one line\nand another", problems)] * 3


def test_an_error_of_a_class_that_others_may_not_know(pool: Pool) -> None:
    first, second = pool.run(2, failure, kind="another")
    assert first == ("UnknownError", "one line\nand another", [])
    assert second == ("UserError", "one line\nand another", [])
