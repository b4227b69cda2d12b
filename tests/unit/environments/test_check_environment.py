"""The checks of an environment before a run: its command, its chat template, its messages."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gspo_megatron.config.schema import RewardSection
from gspo_megatron.environments.agent import Agent
from gspo_megatron.environments.episode import Client
from gspo_megatron.environments.registry import check_environment, get_environment
from gspo_megatron.errors import EpisodeError, RewardError
from gspo_megatron.rewards.registry import check_section, get_reward
from gspo_megatron.types import Prompt

CHAT = [Prompt("p", "a", "f:1", messages=({"role": "user", "content": "p"},))]
TEXT = [*CHAT, Prompt("p", "a", "f:2")]


def check(environment: Any, prompts: list[Prompt], template: str | None = "{{ messages }}") -> str:
    """The problems as text; "" if there are none."""
    tokenizer: Any = SimpleNamespace(name="t.model", chat_template=template)
    try:
        check_environment(environment, tokenizer, prompts)
    except EpisodeError as error:
        return str(error)
    return ""


class Messages:
    async def rollout(self, client: Client, task: Prompt) -> None:
        await client.generate()
        await client.generate([{"role": "user", "content": "more"}])


class Texts:
    async def rollout(self, client: Client, task: Prompt) -> None:
        await client.generate()
        await client.generate(text="more")


class Either:
    async def rollout(self, client: Client, task: Prompt) -> None:
        await client.generate()
        await (client.generate(client.messages) if task.messages else client.generate(text="m"))


class Begins:
    async def rollout(self, client: Client, task: Prompt) -> None:
        client.begin([{"role": "user", "content": "p"}])
        await client.generate()
        await client.generate([{"role": "user", "content": "more"}])


class Judged:
    def __init__(self) -> None:
        self.judge: Any = None

    async def rollout(self, policy: Client, task: Prompt) -> None:
        turn = await policy.generate()
        await self.judge.generate(turn.text)


class OtherName:
    async def rollout(self, policy: Client, task: Prompt) -> None:
        await policy.generate()
        await policy.generate(messages=[{"role": "user", "content": "more"}])


class Declared(Messages):
    needs_messages = False


def test_messages_between_turns_need_prompts_of_messages() -> None:
    for environment in (Messages(), Texts(), Either(), Begins(), Declared(), Judged()):
        assert not check(environment, CHAT)
    for environment in (Texts(), Either(), Begins(), Declared(), Judged()):
        assert not check(environment, TEXT)
    wrong = check(Messages(), TEXT)
    assert "environment Messages: it answers turns with messages, and 1 prompts are no" in wrong
    assert (
        "the first is f:2; allowed: data.chat_template = true, or needs_messages = False" in wrong
    )
    assert "environment OtherName: it answers turns with messages" in check(OtherName(), TEXT)
    tools = get_environment("tool_use")
    assert not check(tools, CHAT)
    assert check(tools, TEXT).endswith("allowed: data.chat_template = true")


def test_a_command_that_cannot_be_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = check(Agent("no-such-program --fast agent.py"), TEXT)
    assert "environment.options.command = 'no-such-program --fast agent.py'" in wrong
    assert "no-such-program: no such program; allowed: one on PATH" in wrong
    command = f"{sys.executable} -u agent.py"
    assert "agent.py: no such file" in check(Agent(command), TEXT)
    (tmp_path / "agent.py").touch()
    assert not check(Agent(command), TEXT)
    assert not check(Agent(f"{sys.executable} -c pass"), TEXT)
    for words in ("-c 'cd x && python run.py'", "-c 'exec ./solve.sh'", "-ec ./solve.sh"):
        assert not check(Agent(f"sh {words}"), TEXT)
    assert not check(Agent("env A=1 'no path.py'"), TEXT)
    assert "solve.sh: no such file" in check(Agent("sh -e solve.sh"), TEXT)
    assert "t.model: has no chat template, which environment Agent needs" in check(
        Agent(command), TEXT, template=None
    )


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({}, None),
        ({"timeout_seconds": 45.0}, r"total_seconds = 45: .* reward.timeout_seconds = 45, "),
        ({"options": {"total_seconds": 70.0}}, "total_seconds = 70: .*; allowed: less than"),
        ({"options": {"total_seconds": 70.0}, "timeout_seconds": 80.0}, None),
        ({"options": {"total_seconds": 70.0}, "workers": 0}, None),
    ],
)
def test_tests_of_a_program_end_before_the_call_that_runs_them(
    settings: dict[str, Any], fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gspo_megatron.process.sandbox.fault", lambda: None)
    section = RewardSection(name="code", **settings)
    reward = get_reward(section.name, None, section.options, section.workers)
    if fault is None:
        check_section(reward, section, 8)
    else:
        with pytest.raises(RewardError, match=fault):
            check_section(reward, section, 8)
