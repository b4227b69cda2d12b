"""Make data for sorting letters. An answer has 12 tokens, more than in the other toy tasks.

python examples/ablation/make_data.py -o FOLDER
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from gspo_megatron.data.toy import train_toy_tokenizer
from gspo_megatron.files import write_atomically
from gspo_megatron.process.failures import run_script

LETTERS, LENGTH = "abcdefghijkl", 12
TRAIN, TEST = 4000, 256


def make_data(folder: Path, seed: int = 1) -> None:
    """Write train.jsonl, test.jsonl and tokenizer.model; no prompt occurs twice."""
    generator = random.Random(f"{seed}/sort")
    strings: dict[str, None] = {}
    while len(strings) < TRAIN + TEST:
        strings["".join(generator.choices(LETTERS, k=LENGTH))] = None
    rows = [{"prompt": f"{text}<", "answer": "".join(sorted(text))} for text in strings]
    for name, part in (("train", rows[:TRAIN]), ("test", rows[TRAIN:])):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        write_atomically(folder / f"{name}.jsonl", lines.encode())
    train_toy_tokenizer(folder / "tokenizer")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER")
    make_data(parser.parse_args(arguments).output)


if __name__ == "__main__":
    sys.exit(run_script(main))
