"""Make prompts with three instructions that a program can check, as rows in the format of IFEval.

    python examples/smollm2_moe/make_prompts.py -o FOLDER

The topics of test.jsonl are in no prompt of train.jsonl.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gspo_megatron.files import write_atomically
from gspo_megatron.process.failures import run_script

TRAIN, TEST = 2000, 64
_TOPICS = (
    "the sea,dogs,a rainy day,coffee,the moon,a bicycle,winter,trees,music,a library,bread,"
    "the desert,a river,cats,a summer evening,tea,the sun,a train,spring,flowers,dancing,a museum,"
    "cheese,the jungle,a lake,horses,a foggy morning,chocolate,the stars,a ship,autumn,mountains,"
    "painting,a market,soup,the city,a waterfall,birds,a thunderstorm,honey,the sky,a bridge,snow,"
    "grass,poetry,a garden,rice,the village,an island,bees,a windy night,lemons,the north pole,"
    "an old car,summer,clouds,theatre,a school,apples,the farm"
)
TOPICS = _TOPICS.split(",")
TEST_TOPICS = 12  # the remaining topics are for training
REQUESTS = (
    "Describe {}.",
    "Tell me about {}.",
    "Write a sentence about {}.",
    "What do you think of {}?",
)
FIRST_WORDS = ("Today", "Imagine", "Many", "Sometimes", "Once", "Look")
KEYWORDS = ("quiet", "old", "warm", "small", "bright", "friend", "morning", "water", "life", "road")
FEWEST = (4, 5, 6)  # the smallest number of words that an instruction may ask for
RANGE = 4  # the largest number of words minus the smallest


def last_instruction(generator: random.Random) -> tuple[str, str, dict[str, Any]]:
    """Return the third instruction: its text, its name in IFEval, and its arguments."""
    kind = generator.choice(("first_word", "keywords", "question"))
    if kind == "first_word":
        word = generator.choice(FIRST_WORDS)
        given = {"num_paragraphs": 1, "nth_paragraph": 1, "first_word": word.lower()}
        text = f"Begin your answer with the word {word}."
        return text, "length_constraints:nth_paragraph_first_word", given
    if kind == "keywords":
        word = generator.choice(KEYWORDS)
        return f"Use the word {word}.", "keywords:existence", {"keywords": [word]}
    given = {"end_phrase": "?"}
    return "End your answer with a question mark.", "startend:end_checker", given


def row(generator: random.Random, topics: Sequence[str], key: int) -> dict[str, Any]:
    request = generator.choice(REQUESTS).format(generator.choice(topics))
    fewest = generator.choice(FEWEST)
    most = fewest + RANGE
    text, name, given = last_instruction(generator)
    at_least = {"relation": "at least", "num_words": fewest}
    less_than = {"relation": "less than", "num_words": most + 1}
    return {
        "key": key,
        "prompt": f"{request} Answer in {fewest} to {most} words. {text}",
        "instruction_id_list": [*["length_constraints:number_words"] * 2, name],
        "kwargs": [at_least, less_than, given],
    }


def make_prompts(folder: Path, seed: int = 1) -> None:
    generator = random.Random(f"{seed}/instructions")
    topics = generator.sample(TOPICS, k=len(TOPICS))
    parts = {"test": (TEST, topics[:TEST_TOPICS]), "train": (TRAIN, topics[TEST_TOPICS:])}
    for name, (count, chosen) in parts.items():
        rows: dict[str, dict[str, Any]] = {}
        while len(rows) < count:  # until there are enough different prompts
            found = row(generator, chosen, len(rows))
            rows.setdefault(found["prompt"], found)
        text = "".join(json.dumps(each) + "\n" for each in rows.values())
        write_atomically(folder / f"{name}.jsonl", text.encode())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    make_prompts(given.output, given.seed)


if __name__ == "__main__":
    sys.exit(run_script(main))
