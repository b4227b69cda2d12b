"""The environment `tool_use`: the policy may call tools, in the format of Qwen's chat templates
(github.com/QwenLM/Qwen-Agent, "hermes"):

    <tool_call>
    {"name": "calculator", "arguments": {"expression": "12 * 34"}}
    </tool_call>

After a turn with calls, the conversation gets one message with the role `tool` for each call. A
turn without calls is the answer, which the reward function scores.
"""

from __future__ import annotations

import ast
import asyncio
import json
import math
import operator
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from gspo_megatron.environments.chat_messages import calls_in
from gspo_megatron.environments.episode import Client
from gspo_megatron.environments.registry import register
from gspo_megatron.errors import EpisodeError
from gspo_megatron.process import sandbox
from gspo_megatron.process.heartbeat import heartbeat
from gspo_megatron.types import Prompt

_SHOWN_CHARACTERS = 2000  # a longer answer of a tool is cut
_MOST_CALLS = 16  # of a turn; a program may take ten seconds


class ToolError(Exception):
    """Raised for a wrong call of a tool. The policy gets the error's message."""


@dataclass(frozen=True)
class Tool:
    name: str
    description: str
    argument: str  # the name of the tool's only argument, which is a string
    call: Callable[[str], Awaitable[str]]

    def schema(self) -> dict[str, Any]:
        """Return the tool's description in the format of chat templates."""
        argument = {self.argument: {"type": "string"}}
        parameters = {"type": "object", "properties": argument, "required": [self.argument]}
        about = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": about}


@register("tool_use")
class ToolUse:
    """Lets the policy call tools. `tools`: the names of the tools; default: only the calculator."""

    needs_messages = True

    def __init__(self, tools: list[str] | None = None) -> None:
        names = ["calculator"] if tools is None else tools
        unknown = [name for name in names if name not in _TOOLS]
        if unknown or not names:
            allowed = ", ".join(_TOOLS)
            raise ValueError(f"environment.options.tools = {names}; allowed: some of {allowed}")
        if "python" in names and (fault := sandbox.fault()) is not None:
            raise ValueError(f"environment.options.tools = {names}: python: {fault}")
        self._tools = {name: _TOOLS[name] for name in names}
        self.tools = [tool.schema() for tool in self._tools.values()]

    async def rollout(self, client: Client, task: Prompt) -> None:
        turn = await client.generate()
        while (calls := calls_in(turn.text)[0]) and client.turns_left:
            answers = [await self._answer(call) for call in calls[:_MOST_CALLS]]
            answers += [f"error: at most {_MOST_CALLS} calls a turn"] * len(calls[_MOST_CALLS:])
            turn = await client.generate([{"role": "tool", "content": a} for a in answers])

    async def _answer(self, text: str) -> str:
        try:
            tool, argument = self._parsed_call(text)
            answer = await tool.call(argument)
        except ToolError as error:
            answer = f"error: {error}"
        return answer[:_SHOWN_CHARACTERS]

    def _parsed_call(self, text: str) -> tuple[Tool, str]:
        try:
            call = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ToolError(f"the call is not JSON: {error}") from error
        name = call.get("name") if isinstance(call, dict) else None
        tool = self._tools.get(name) if isinstance(name, str) else None
        if tool is None:
            raise ToolError(f"no tool {name!r}; there are: {', '.join(self._tools)}")
        arguments = call.get("arguments")
        value = arguments.get(tool.argument) if isinstance(arguments, dict) else None
        if not isinstance(value, str):
            raise ToolError(f"{tool.name} wants the argument {tool.argument!r}, a string")
        return tool, value


_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_LONGEST_EXPRESSION, _LARGEST_EXPONENT, _LARGEST_BASE = 500, 100, 10**6


async def calculate(expression: str) -> str:
    """Evaluate an arithmetic expression. Walks its syntax tree and executes no code."""
    if len(expression) > _LONGEST_EXPRESSION:
        raise ToolError(f"the expression has more than {_LONGEST_EXPRESSION} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
        if isinstance(value, float) and not math.isfinite(value):
            raise ToolError("the value is too large")
        return str(value)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ToolError(f"{type(error).__name__}: {error}") from error


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant):
        number = node.value
        if isinstance(number, int | float) and not isinstance(number, bool):
            return number
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            if abs(right) > _LARGEST_EXPONENT or abs(left) > _LARGEST_BASE:
                raise ToolError("the power is too large")
            return _real(left**right)
        if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](left, right)
    raise ToolError("only numbers, + - * / // % ** and parentheses are understood")


def _real(value: Any) -> int | float:
    if isinstance(value, complex):
        raise ToolError("the power is no real number")
    return value


_PROGRAMS = sandbox.Limits(seconds=5.0, memory_mb=512, processes=8, disk_mb=16)
# Not the threads of asyncio.to_thread, because other work would wait for these programs.
_THREADS = ThreadPoolExecutor(thread_name_prefix="python-tool")


async def run_python(code: str) -> str:
    """Run a program in a sandbox (process/sandbox.py); return its output, and why it failed."""
    try:
        outcome = await asyncio.get_running_loop().run_in_executor(
            _THREADS, sandbox.run, code.encode(errors="replace"), b"", _PROGRAMS
        )
        heartbeat()  # the other episodes may wait for this program
    except sandbox.SandboxError as error:
        raise EpisodeError(f"the sandbox: {error}") from error
    printed = outcome.stdout[: 4 * _SHOWN_CHARACTERS].decode(errors="replace")
    return printed if outcome.failure is None else f"{printed}error: {outcome.failure}"


_TOOLS = {
    "calculator": Tool("calculator", "Computes an arithmetic expression.", "expression", calculate),
    "python": Tool("python", "Runs a program, returns what it prints.", "code", run_python),
}
