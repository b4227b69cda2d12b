"""The environment `tool_use`: right and wrong calls, in the form in which a policy writes them."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gspo_megatron.environments.chat_messages import calls_in
from gspo_megatron.environments.registry import get_environment
from gspo_megatron.environments.tool_use import ToolError, ToolUse, calculate
from gspo_megatron.errors import EpisodeError


def answer(text: str) -> str:
    return asyncio.run(ToolUse()._answer(text))


def test_expressions_have_the_value_that_python_gives_them() -> None:
    draw = random.Random(3)
    for _ in range(300):
        parts = [str(draw.randint(0, 999))]
        for _ in range(draw.randint(0, 5)):
            parts += [draw.choice(["+", "-", "*", "//", "%", "/"]), f"({draw.randint(1, 99)} + 1)"]
        expression = " ".join(parts)
        assert asyncio.run(calculate(expression)) == str(eval(expression))
    assert asyncio.run(calculate(" -2 ** 3 + .5 ")) == "-7.5"


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').getcwd()",
        "open('/etc/passwd')",
        "[1] * 9",
        "'a' * 9",
        "True + 1",
        "1 if 1 else 2",
        "x",
        "1 +",
        "1 / 0",
        "9 ** 9 ** 9",
        "(10 ** 6) ** 101",
        "2 ** -2000",
        "(-8) ** 0.5",
        "1e308 * 10 // 1",
        "1j",
        "(" * 400 + "1" + ")" * 400,
        "1+" * 300 + "1",
        "",
        "1\x00",
    ],
)
def test_other_expressions_are_refused(expression: str) -> None:
    with pytest.raises(ToolError):
        asyncio.run(calculate(expression))


@pytest.mark.timeout(60)
def test_calls_without_an_end_cost_no_time() -> None:
    """A policy that has learnt nothing else may repeat one token."""
    text = "so <tool_call>a</tool_call> and <tool_call>b</tool_call>" + "<tool_call>" * 60_000
    calls, rest = calls_in(text)
    assert calls == ["a", "b"] and rest == "so  and " + "<tool_call>" * 60_000


def test_a_call_is_answered() -> None:
    assert answer('\n{"name": "calculator", "arguments": {"expression": "12*34"}}\n') == "408"


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("12*34", "calculator wants"),
        ("{", "the call is not JSON"),
        ("[" * 100_000, "the call is not JSON"),
        ('["calculator"]', "no tool None; there are: calculator"),
        ('{"name": ["calculator"]}', "no tool"),
        ('{"name": "search", "arguments": {}}', "no tool 'search'"),
        ('{"name": "calculator"}', "wants the argument 'expression', a string"),
        ('{"name": "calculator", "arguments": {"expression": 3}}', "a string"),
        ('{"name": "calculator", "arguments": {"expression": "a"}}', "only numbers"),
    ],
)
def test_the_policy_is_told_what_is_wrong(call: str, told: str) -> None:
    if call == "12*34":
        call = '{"name": "calculator", "arguments": "12*34"}'
    assert answer(call).startswith("error: ") and told in answer(call)


def test_a_turn_has_at_most_sixteen_calls() -> None:
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>'

    class Scripted:
        turns_left, answers = 1, [""]

        async def generate(self, messages: Any = ()) -> Any:
            self.answers = [message["content"] for message in messages]
            return SimpleNamespace(text="" if messages else 18 * call)

    client: Any = Scripted()
    asyncio.run(ToolUse().rollout(client, cast(Any, None)))
    assert client.answers == ["2"] * 16 + ["error: at most 16 calls a turn"] * 2


def test_python_runs_in_a_sandbox(tmp_path: Path) -> None:
    """The limits of a program in the sandbox are tested in tests/unit/process/test_sandbox.py."""
    environment = ToolUse(["python"])

    def ask(code: str) -> str:
        call = json.dumps({"name": "python", "arguments": {"code": code}})
        return asyncio.run(environment._answer(call))

    assert ask("print(12 * 34)") == "408\n"
    assert ask("print('a'); 1 / 0").startswith("a\nerror: ")
    secret = tmp_path / "secret"
    secret.write_text("of this machine")
    assert "FileNotFoundError" in ask(f"print(open({str(secret)!r}).read())")
    assert len(ask("print('x' * 10**6)")) <= 2000
    assert "'calculator'" in asyncio.run(environment._answer('{"name": "calculator"}'))


def test_tools_are_named_by_the_configuration() -> None:
    environment = get_environment("tool_use", None, {"tools": ["calculator"]})
    assert environment is not None
    (schema,) = environment.tools
    assert schema["function"]["name"] == "calculator"
    assert list(schema["function"]["parameters"]["properties"]) == ["expression"]
    for tools in (["search"], []):
        with pytest.raises(EpisodeError, match=r"tools = .*allowed: some of calculator, python"):
            get_environment("tool_use", None, {"tools": tools})
