"""Text about small sums for the whole life of a tiny model: pre-training, fine-tuning, RL, test.

    corpus.jsonl    documents of true sentences       {"text": "19 plus 24 is 43. ..."}
    held_out.jsonl  more of them, for the evaluation loss
    sft.jsonl       conversations                      {"messages": [question, answer]}
    train.jsonl     prompts for reinforcement learning {"prompt": "What is 19 plus 24?", ...}
    test.jsonl      prompts whose two numbers are together in no sentence of any other file

`python -m gspo_megatron.data.toy_text --help` writes them. Digits should be one token each:
tools/train_tokenizer.py --user-symbols 0 1 2 3 4 5 6 7 8 9.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_megatron.data.files import write_atomically
from gspo_megatron.data.toy import NUMBERS, json_lines
from gspo_megatron.errors import DataError, UserError

# Each is true for a + b = c.
SENTENCES = (
    "{a} plus {b} is {c}.",
    "{a}+{b}={c}.",
    "The sum of {a} and {b} is {c}.",
    "{c} minus {b} is {a}.",
    "{c}-{a}={b}.",
    "{name} has {a} {thing} and finds {b} more. Now {name} has {c} {thing}.",
    "There were {c} {thing}. {name} took {a}, and {b} were left.",
    "What is {a} plus {b}? It is {c}.",
)
QUESTIONS = ("What is {a} plus {b}?", "{a}+{b}=?", "What is the sum of {a} and {b}?")
NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eve", "Finn")
THINGS = ("apples", "books", "coins", "leaves", "shells", "stones")
SENTENCES_OF_A_DOCUMENT = (4, 16)
PAIRS = len(NUMBERS) * (len(NUMBERS) + 1) // 2  # of numbers in either order

Pair = tuple[int, int]


@dataclass(frozen=True)
class Sizes:
    """How many rows the files get."""

    documents: int = 4000
    held_out: int = 100
    conversations: int = 500
    train: int = 2000
    test: int = 100


def generate_text(sizes: Sizes, seed: int) -> dict[str, list[dict[str, Any]]]:
    """Rows by file name. The result depends on the arguments only.

    Raises DataError for a count below 1 or more test prompts than can be spared.
    """
    for name, count in vars(sizes).items():
        if count < 1:
            raise DataError(f"{name} = {count}: at least 1 row is needed")
    if sizes.test > PAIRS // 4:
        raise DataError(f"test = {sizes.test}: legal: 1 to {PAIRS // 4}, a quarter of all pairs")
    source = random.Random(f"{seed}/text")  # through SHA-512, the same in every Python version
    pairs = [(a, b) for a in NUMBERS for b in NUMBERS if a <= b]
    source.shuffle(pairs)
    tested, known = pairs[: sizes.test], pairs[sizes.test :]
    return {
        "corpus.jsonl": [_document(known, source) for _ in range(sizes.documents)],
        "held_out.jsonl": [_document(known, source) for _ in range(sizes.held_out)],
        "sft.jsonl": [_conversation(known, source) for _ in range(sizes.conversations)],
        "train.jsonl": [_prompt(source.choice(known), source) for _ in range(sizes.train)],
        "test.jsonl": [_prompt(pair, source) for pair in tested],
    }


def write_toy_text(out_dir: str | Path, sizes: Sizes, seed: int = 1) -> list[Path]:
    """Writes all files; returns their paths. The same arguments give the same bytes.

    Raises DataError as `generate_text` does, or where the folder cannot be written.
    """
    return [
        write_atomically(Path(out_dir) / name, json_lines(rows))
        for name, rows in generate_text(sizes, seed).items()
    ]


def _document(pairs: Sequence[Pair], source: random.Random) -> dict[str, str]:
    count = source.randint(*SENTENCES_OF_A_DOCUMENT)
    return {"text": " ".join(_sentence(source.choice(pairs), source) for _ in range(count))}


def _sentence(pair: Pair, source: random.Random) -> str:
    a, b = source.sample(pair, 2)
    return source.choice(SENTENCES).format(
        a=a, b=b, c=a + b, name=source.choice(NAMES), thing=source.choice(THINGS)
    )


def _prompt(pair: Pair, source: random.Random) -> dict[str, str]:
    a, b = source.sample(pair, 2)
    return {"prompt": source.choice(QUESTIONS).format(a=a, b=b), "answer": str(a + b)}


def _conversation(pairs: Sequence[Pair], source: random.Random) -> dict[str, Any]:
    row = _prompt(source.choice(pairs), source)
    return {
        "messages": [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["answer"]},
        ]
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code (2 for a user's mistake)."""
    parser = argparse.ArgumentParser(
        prog="python -m gspo_megatron.data.toy_text",
        description="Writes text about small sums for each stage of a tiny model's life.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, count in vars(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=count, help="rows")
    parser.add_argument("--seed", type=int, default=1, help="other seeds give other text")
    parser.add_argument("-o", "--output", required=True, metavar="DIR", help="folder to write")
    options = vars(parser.parse_args(arguments))
    out_dir, seed = options.pop("output"), options.pop("seed")
    try:
        paths = write_toy_text(out_dir, Sizes(**options), seed)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    for path in paths:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
