"""Data for products that a tiny model can compute only with a calculator.

    python examples/tool_use/make_data.py -o FOLDER

supervised.jsonl has conversations. Most of them answer at once with a guess of the right length;
some call the calculator and repeat its result. So the fine-tuned model knows both ways, and mostly
guesses.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gspo_megatron.data.chat import TEMPLATE_FILE
from gspo_megatron.data.tokenizers import train_sentencepiece
from gspo_megatron.files import write_atomically
from gspo_megatron.process.failures import run_script

TRAIN, TEST, EXAMPLES = 2000, 128, 16000
CALLING = 0.2  # share of the conversations that call the calculator
CALL = '<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{}"}}}}\n</tool_call>'
# Each of these is one token, so a tiny model needs only four tokens for the fixed text of a call.
SYMBOLS = ['<tool_call>\n{"name": "calculator", "arguments": {"expression": "', '"}}\n</tool_call>']
TURNS = [f"<|{role}|>" for role in ("system", "user", "assistant", "tool")]
TEMPLATE = """\
{%- if tools -%}<|system|>
{%- for tool in tools -%}{{- tool.function.name -}}{%- endfor -%}{{- eos_token -}}{%- endif -%}
{%- for message in messages -%}{{- '<|' ~ message.role ~ '|>' -}}
{%- if message.role == 'assistant' -%}
{%- generation -%}{{- message.content ~ eos_token -}}{%- endgeneration -%}
{%- else -%}{{- message.content ~ eos_token -}}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""


def products(generator: random.Random) -> Iterator[tuple[int, int]]:
    """Yield pairs of factors without end. No pair occurs twice."""
    seen = set()
    while True:
        pair = generator.randrange(100, 1000), generator.randrange(100, 1000)
        if pair not in seen:
            seen.add(pair)
            yield pair


def conversation(generator: random.Random, left: int, right: int) -> list[dict[str, Any]]:
    asked, result = f"{left}*{right}", str(left * right)
    messages = [{"role": "user", "content": asked}]
    if generator.random() < CALLING:
        messages += [
            {"role": "assistant", "content": CALL.format(asked)},
            {"role": "tool", "content": result},
        ]
    else:  # a guess with the right length and the right first two digits
        digits = [generator.choice("0123456789") for _ in result[2:]]
        result = result[:2] + "".join(digits)
    return [*messages, {"role": "assistant", "content": result}]


def make_data(folder: Path, seed: int = 1) -> None:
    """Write the files for fine-tuning and RL, and the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(f"{seed}/tools")
    pairs = products(generator)
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, count in (("train", TRAIN), ("test", TEST)):
        chosen = [next(pairs) for _ in range(count)]
        rows[name] = [
            {"prompt": f"{left}*{right}", "answer": str(left * right)} for left, right in chosen
        ]
    rows["supervised"] = [
        {"messages": conversation(generator, *next(pairs))} for _ in range(EXAMPLES)
    ]
    for name, lines in rows.items():
        text = "".join(json.dumps(row) + "\n" for row in lines)
        write_atomically(folder / f"{name}.jsonl", text.encode())
    letters = "".join(sorted(set("".join(map(chr, range(32, 127))))))
    train_sentencepiece(
        [letters] * 9,
        160,
        folder / "tokenizer",
        "char",
        user_defined_symbols=[symbol.replace(" ", "▁") for symbol in SYMBOLS],
        control_symbols=TURNS,
    )
    write_atomically(folder / TEMPLATE_FILE, TEMPLATE.encode())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER")
    make_data(parser.parse_args(arguments).output)


if __name__ == "__main__":
    sys.exit(run_script(main))
