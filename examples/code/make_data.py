"""Data for a task in which a response is a one-line program. Tests decide whether the program is
right. A model that is fine-tuned on these data often forgets the parentheses of the program.

    python examples/code/make_data.py -o FOLDER

supervised.jsonl has conversations. In most of them the program has no parentheses, or leaves out a
step; some programs are right. So the fine-tuned model can write right programs, but prefers wrong
ones.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gspo_megatron.data.character_tokenizer import write_character_tokenizer
from gspo_megatron.files import write_atomically
from gspo_megatron.process.failures import run_script

TRAIN, TEST, EXAMPLES = 2000, 128, 16000
RIGHT, WITHOUT_A_STEP = 0.2, 0.2  # shares of the programs; the rest have no parentheses
INPUTS = 5  # the inputs on which a program is tried
WORDS = {"+": "add", "-": "subtract", "*": "multiply by"}
BEGIN, END = "```python\nfor x in map(int, open(0)): print(", ")\n```"
# Each of these strings is one token, so that a response has about 25 tokens.
SYMBOLS = [
    "```python\n",
    "\n```",
    "for",
    "in",
    "map(int,",
    "open(0)):",
    "print(",
    "add",
    "subtract",
    "multiply",
    "by",
]
TURNS = [f"<|{role}|>" for role in ("user", "assistant")]
TEMPLATE = """\
{%- for message in messages -%}{{- '<|' ~ message.role ~ '|>' -}}
{%- if message.role == 'assistant' -%}
{%- generation -%}{{- message.content ~ eos_token -}}{%- endgeneration -%}
{%- else -%}{{- message.content ~ eos_token -}}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""

Steps = tuple[tuple[str, int], ...]  # operators and numbers


def tasks(generator: random.Random) -> Iterator[Steps]:
    """Yield tasks without end. No task occurs twice, and each needs parentheses."""
    seen = set()
    while True:
        count = generator.choice((2, 3, 4))
        steps = tuple((generator.choice("+-*"), generator.randrange(2, 100)) for _ in range(count))
        if steps not in seen and value(flat(steps), 1) != value(nested(steps), 1):
            seen.add(steps)
            yield steps


def asked(steps: Steps) -> str:
    return ", ".join(f"{WORDS[operator]} {number}" for operator, number in steps)


def flat(steps: Steps) -> str:
    return "x" + "".join(f"{operator}{number}" for operator, number in steps)


def nested(steps: Steps) -> str:
    closed = ")".join(f"{operator}{number}" for operator, number in steps)
    return "(" * (len(steps) - 1) + "x" + closed


def value(expression: str, x: int) -> int:
    """The value of an expression of `flat` or `nested`."""
    return int(eval(expression, {"x": x}))


def program(generator: random.Random, steps: Steps) -> str:
    chance = generator.random()
    if chance < RIGHT:
        expression = nested(steps)
    elif chance < RIGHT + WITHOUT_A_STEP:
        left_out = generator.randrange(len(steps))
        expression = flat(steps[:left_out] + steps[left_out + 1 :])
    else:
        expression = flat(steps)
    return BEGIN + expression + END


def row(generator: random.Random, steps: Steps) -> dict[str, Any]:
    """A prompt with its tests in the format of APPS: one test with several lines of input."""
    numbers = generator.sample(range(-99, 100), INPUTS)
    results = [value(nested(steps), x) for x in numbers]
    given, wanted = ("\n".join(map(str, each)) for each in (numbers, results))
    return {"prompt": asked(steps), "inputs": [given], "outputs": [wanted]}


def make_data(folder: Path, seed: int = 1) -> None:
    """Write the files for fine-tuning and RL, and the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(f"{seed}/code")
    source = tasks(generator)
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, count in (("train", TRAIN), ("test", TEST)):
        rows[name] = [row(generator, next(source)) for _ in range(count)]
    conversations = []
    for _ in range(EXAMPLES):
        steps = next(source)
        turns = {"user": asked(steps), "assistant": program(generator, steps)}
        messages = [{"role": role, "content": content} for role, content in turns.items()]
        conversations.append({"messages": messages})
    rows["supervised"] = conversations
    for name, lines in rows.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        write_atomically(folder / f"{name}.jsonl", text.encode())
    write_character_tokenizer(
        folder / "tokenizer",
        [line["prompt"] for line in rows["train"]],
        160,
        byte_fallback=False,
        user_symbols=[*SYMBOLS, *"x+-*()"],
        control_symbols=TURNS,
        chat_template=TEMPLATE,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER")
    make_data(parser.parse_args(arguments).output)


if __name__ == "__main__":
    sys.exit(run_script(main))
