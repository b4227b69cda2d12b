"""Make prompts that ask for a copy of a sentence, each with its answer.

    python examples/distillation/make_copies.py -o FOLDER

The nouns of test.jsonl are in no sentence of train.jsonl.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from gspo_megatron.files import write_atomically
from gspo_megatron.process.failures import run_script

TRAIN, TEST = 1000, 128
ADJECTIVES = "small,old,bright,quiet,warm,green,tall,cold,soft,heavy,young,dark,clean,round,empty"
_NOUNS = (
    "river,lamp,stone,garden,window,apple,horse,bread,cloud,table,forest,candle,mountain,paper,"
    "winter,music,bridge,coffee,island,silver,tower,letter,market,engine,pocket,doctor,summer,"
    "basket,valley,mirror,hammer,orange,ladder,farmer,tiger,blanket,ticket,kitchen,button,painter"
)
NOUNS = _NOUNS.split(",")
TEST_NOUNS = 10  # the remaining nouns are for training
PLACES = ("near", "behind", "above", "under")


def sentence(generator: random.Random, nouns: Sequence[str]) -> str:
    first, second = generator.sample(nouns, k=2)
    one, other = generator.sample(ADJECTIVES.split(","), k=2)
    return f"The {one} {first} is {generator.choice(PLACES)} the {other} {second}."


def make_copies(folder: Path, seed: int = 1) -> None:
    generator = random.Random(f"{seed}/copies")
    nouns = generator.sample(NOUNS, k=len(NOUNS))
    parts = {"test": (TEST, nouns[:TEST_NOUNS]), "train": (TRAIN, nouns[TEST_NOUNS:])}
    for name, (count, chosen) in parts.items():
        found: dict[str, None] = {}
        while len(found) < count:  # until there are enough different sentences
            found[sentence(generator, chosen)] = None
        rows = [
            {"prompt": f"Copy this sentence exactly. Write nothing else.\n{each}", "answer": each}
            for each in found
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        write_atomically(folder / f"{name}.jsonl", text.encode())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    make_copies(given.output, given.seed)


if __name__ == "__main__":
    sys.exit(run_script(main))
