"""The key `failed` of a suite. Only evaluations that survive a failed reward use it."""

from __future__ import annotations

import pytest

from gspo_megatron.config.load import parse_suites
from gspo_megatron.errors import ConfigError


def test_failed_is_refused_where_nothing_reads_it() -> None:
    suite = {"prompts": "problems.jsonl", "failed": "wrong"}
    with pytest.raises(ConfigError, match=r"suites\.a\.failed = 'wrong': .* = stop ends the eval"):
        parse_suites({"a": suite}, [])
    section = parse_suites({"a": {**suite, "reward": {"on_failure": "drop_group"}}}, [])
    assert section.suites["a"].failed == "wrong"
