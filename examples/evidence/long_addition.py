"""A task with long answers: add the same number again and again, with written carries.

    python examples/evidence/long_addition.py -o FOLDER

A prompt gives a start and an addend below 100; the answer is the next 21 sums, modulo 100. A number
is written with the units first, in the order of an addition by hand: a letter a to j for the units,
+ or - for a carry or no carry, a digit for the tens. The addend is written with capital letters: K
to T for the tens, A to J for the units.

    f-1MD=    start 15, addend 23: sums 38, 61, 84, 7, ...
    i-3b-6e-8h+0...

So an answer has 63 tokens and an end of sequence, and each token follows from three or four earlier
tokens. The reward counts every number that is right, given the number before it. So one mistake
costs only one number, and only an answer without mistakes has the reward 1.

train.jsonl and test.jsonl have right answers. In careless.jsonl 30% of the numbers have one wrong
token. A model that can add and is fine-tuned on these answers gets 70% of the numbers right.
Reinforcement learning begins with this model.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from gspo_megatron.data.tokenizers import train_sentencepiece
from gspo_megatron.files import write_atomically
from gspo_megatron.process.failures import run_script
from gspo_megatron.types import Sample

UNITS, DIGITS, ADDEND_UNITS, ADDEND_TENS = "abcdefghij", "0123456789", "ABCDEFGHIJ", "KLMNOPQRST"
CHARACTERS = UNITS + DIGITS + ADDEND_UNITS + ADDEND_TENS + "+-="
VOCABULARY = len(CHARACTERS) + 3
NUMBERS, WIDTH = 21, 3  # numbers in an answer, and tokens in a number
TRAIN, TEST = 8000, 48
MISTAKES = 0.3  # share of wrong numbers in careless.jsonl


def written(units: int, carry: bool, tens: int) -> str:
    return f"{UNITS[units]}{'-+'[carry]}{tens}"


def row(start: int, addend: int) -> dict[str, str]:
    """A prompt with its answer."""
    tens, units = divmod(addend, 10)
    first = written(start % 10, False, start // 10)
    numbers, value = [], start
    for _ in range(NUMBERS):
        carry = value % 10 + units > 9
        value = (value + addend) % 100
        numbers.append(written(value % 10, carry, value // 10))
    return {
        "prompt": f"{first}{ADDEND_TENS[tens]}{ADDEND_UNITS[units]}=",
        "answer": "".join(numbers),
    }


def careless_row(start: int, addend: int, source: random.Random) -> dict[str, str]:
    """A prompt with a careless answer. The number after a mistake continues from the wrong
    number."""
    right = row(start, addend)
    numbers, text = [], right["prompt"][:WIDTH]
    for _ in range(NUMBERS):
        text = next_number(text, addend)
        if source.random() < MISTAKES:
            place = source.randrange(WIDTH)
            others = [c for c in (UNITS, "+-", DIGITS)[place] if c != text[place]]
            text = text[:place] + source.choice(others) + text[place + 1 :]
        numbers.append(text)
    return {**right, "answer": "".join(numbers)}


def right_steps(sample: Sample) -> float:
    """The share of numbers that are right, given the number before them in the response. Missing
    and surplus numbers count as wrong."""
    first, tens, units = sample.prompt[:WIDTH], sample.prompt[WIDTH], sample.prompt[WIDTH + 1]
    addend = 10 * ADDEND_TENS.index(tens) + ADDEND_UNITS.index(units)
    text, right = first + sample.response, 0
    for place in range(WIDTH, len(text), WIDTH):
        before, after = text[place - WIDTH : place], text[place : place + WIDTH]
        right += is_number(before) and after == next_number(before, addend)
    return right / max(NUMBERS, -(-len(sample.response) // WIDTH))


def is_number(text: str) -> bool:
    return text[0] in UNITS and text[1] in "+-" and text[2] in DIGITS


def next_number(text: str, addend: int) -> str:
    units, tens = UNITS.index(text[0]), int(text[2])
    value = 10 * tens + units + addend
    return written(value % 10, units + addend % 10 > 9, value // 10 % 10)


def make_data(folder: Path, seed: int = 1) -> None:
    """Write the three files of rows and tokenizer.model; no prompt occurs twice."""
    pairs = [(start, addend) for start in range(100) for addend in range(1, 100)]
    source = random.Random(f"{seed}/long addition")
    source.shuffle(pairs)
    rows = [row(*pair) for pair in pairs[: TRAIN + TEST]]
    careless = [careless_row(*pair, source) for pair in pairs[:TRAIN]]
    files = {"train": rows[:TRAIN], "test": rows[TRAIN:], "careless": careless}
    for name, part in files.items():
        lines = "".join(json.dumps(each) + "\n" for each in part)
        write_atomically(folder / f"{name}.jsonl", lines.encode())
    train_sentencepiece([CHARACTERS], VOCABULARY, folder / "tokenizer", model_type="char")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER")
    make_data(parser.parse_args(arguments).output)


if __name__ == "__main__":
    sys.exit(run_script(main))
