"""The messages of `check` about an environment or a reward that cannot work. The command reports
all problems at once, with exit code 2."""

from __future__ import annotations

import sys

import pytest

from tests.unit.cli.conftest import Command, ConfigWriter


def test_an_environment_that_no_prompt_fits_is_refused(
    write_config: ConfigWriter, gspo: Command
) -> None:
    words = ("environment.name=tool_use", "evaluation.suites={}")
    code, _, err = gspo("check", write_config(), *words)
    assert code == 2 and "environment ToolUse: it answers turns with messages, and 2 prompts" in err
    assert "prompts.jsonl:1; allowed: data.chat_template = true" in err


def test_a_command_is_looked_for_on_this_machine_only(
    write_config: ConfigWriter, gspo: Command
) -> None:
    path = write_config()
    words = ("environment.name=agent", "environment.options={command: no-such-program}")
    code, _, err = gspo("check", path, *words)
    assert code == 2 and "no-such-program: no such program" in err
    assert "has no chat template, which environment Agent needs" in err
    code, _, err = gspo("check", path, *words, "--no-files")
    assert (code, err) == (0, "")
    code, _, err = gspo(
        "check", path, words[0], f"environment.options={{command: {sys.executable}}}"
    )
    assert code == 2 and "no such program" not in err


def test_a_taskset_without_an_interpreter_is_one_problem(
    write_config: ConfigWriter, gspo: Command
) -> None:
    code, _, err = gspo("check", write_config(), "environment.verifiers=a", "--no-files")
    assert (code, err.count("\n")) == (2, 1) and err.startswith("environment.python = null: ")


SUITE = "evaluation.suites={a: {prompts: p.jsonl, reward: {%s}}}"
UNREAD = "nothing reads it without reward.workers; allowed: "


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["reward.name=code", "reward.timeout_seconds=30.0"], "reward.options.total_seconds = 45:"),
        ([SUITE % "name: code, timeout_seconds: 9.0"], "evaluation.suites.a: reward.options.total"),
        (["reward.timeout_seconds=5.0"], f"reward.timeout_seconds = 5.0: {UNREAD}60.0"),
        ([SUITE % "memory_mb: 9"], f"evaluation.suites.a: reward.memory_mb = 9: {UNREAD}8192"),
        (["reward.timeout_seconds=5.0", "reward.workers=1"], ""),
        (["reward.timeout_seconds=5.0", "objective.distillation.url=http://a/v1"], ""),
    ],
)
def test_limits_of_a_call_that_are_too_small_or_not_read_are_refused(
    write_config: ConfigWriter,
    gspo: Command,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    told: str,
) -> None:
    monkeypatch.setattr("gspo_megatron.process.sandbox.fault", lambda: None)
    code, _, err = gspo("check", write_config(), *words, "--no-files")
    assert (code, err.count("\n")) == ((2, 1) if told else (0, 0)) and err.startswith(told)
