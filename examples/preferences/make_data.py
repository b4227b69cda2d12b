"""Data of the example: pairs of responses with a noisy choice, prompts, and texts for the first
policy.

python examples/preferences/make_data.py -o FOLDER [--seed N] [--pairs N]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
from rule import prefers_first, score

from gspo_megatron.data.toy import train_toy_tokenizer
from gspo_megatron.files import write_atomically
from gspo_megatron.process.failures import run_script

LETTERS, NAMED = "abcdefgh", 4  # a prompt names 4 of these letters
LENGTHS = range(1, 9)  # the lengths of the random responses, in characters
# The chance that a character is drawn from the prompt's letters; otherwise it is one of LETTERS.
FITTING = 0.5
POLICY_ROWS, PROMPTS, HELD_OUT = 4000, 1000, 400


def response(letters: str, chance: random.Random) -> str:
    """Return a random response, as the first policy learns to write it."""
    pools = [
        letters if chance.random() < FITTING else LETTERS for _ in range(chance.choice(LENGTHS))
    ]
    return "".join(map(chance.choice, pools))


def make_data(folder: Path, seed: int, pairs: int) -> None:
    """Write policy.jsonl, pairs.jsonl, held_out_pairs.jsonl, prompts.jsonl and the tokenizer."""
    chance = random.Random(f"{seed}/preferences")

    def letters() -> str:
        return "".join(chance.sample(LETTERS, NAMED))

    def pair() -> dict[str, str]:
        asked = letters()
        first, second = response(asked, chance), response(asked, chance)
        if not prefers_first(asked, first, second, chance):
            first, second = second, first
        return {"prompt": f"{asked}>", "chosen": first, "rejected": second}

    policy = ((asked, response(asked, chance)) for asked in (letters() for _ in range(POLICY_ROWS)))
    write(folder / "policy.jsonl", ({"prompt": f"{a}>", "answer": text} for a, text in policy))
    rows = [pair() for _ in range(pairs + HELD_OUT)]
    write(folder / "pairs.jsonl", rows[:pairs])
    write(folder / "held_out_pairs.jsonl", rows[pairs:])
    write(folder / "prompts.jsonl", ({"prompt": f"{letters()}>"} for _ in range(PROMPTS)))
    train_toy_tokenizer(folder / "tokenizer")
    print(f"the rule agrees with {agreement(rows):.1%} of the choices")


def agreement(rows: Sequence[dict[str, str]]) -> float:
    """Return the share of pairs in which the chosen response has the higher score; ties count half.

    The annotators also prefer long responses a little. So a model that prefers long
    responses, too, can agree with more choices than the score does.
    """
    total = 0.0
    for row in rows:
        letters = row["prompt"].removesuffix(">")
        chosen, rejected = (score(letters, row[name]) for name in ("chosen", "rejected"))
        total += 0.5 if chosen == rejected else chosen > rejected
    return total / len(rows)


def write(path: Path, rows: Iterable[dict[str, str]]) -> None:
    write_atomically(path, "".join(f"{json.dumps(row)}\n" for row in rows).encode())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--pairs", type=int, default=12000, metavar="N")
    given = parser.parse_args(arguments)
    make_data(given.output, given.seed, given.pairs)


if __name__ == "__main__":
    sys.exit(run_script(main))
