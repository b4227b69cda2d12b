"""Small tasks with one right answer, which a tiny model learns on a CPU in minutes.

    reversal  cabd>   dbac     3 or 4 letters a-h
    copy      cabd=   cabd
    sort      cabd<   abcd
    addition  37+45=  82       two numbers of 2 digits, 10 to 49
    mixed     reversal and addition, 3 to 1

One character is one token. `python -m gspo_megatron.data.toy -o DIR` writes a data set and its
tokenizer. With --documents it writes text for pre-training instead of the tokenizer. A tokenizer
can be trained on this text.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import string
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from gspo_megatron.data.tokenizers import train_sentencepiece
from gspo_megatron.errors import DataError, UserError
from gspo_megatron.files import write_atomically

LETTERS = "abcdefgh"
LENGTHS = range(3, 5)
NUMBERS = range(10, 50)
# With the unknown, padding and end-of-sequence tokens there are 48 ids. This number is divisible by
# every tensor-parallel size of a small run.
CHARACTERS = string.ascii_lowercase + string.digits + " +-*=<>?."
VOCAB_SIZE = len(CHARACTERS) + 3

# task -> (the character that ends its prompts, the answer for a letter string)
LETTER_TASKS: dict[str, tuple[str, Callable[[str], str]]] = {
    "reversal": (">", lambda letters: letters[::-1]),
    "copy": ("=", lambda letters: letters),
    "sort": ("<", lambda letters: "".join(sorted(letters))),
}
MIXTURES: dict[str, dict[str, int]] = {"mixed": {"reversal": 3, "addition": 1}}
# A tiny model learns to reverse long before it learns to add. The first constant is the share of
# additions in the supervised rows of `mixed`. With this share, 30 to 40% of the answers to both
# tasks are right at the start of RL. The second constant is the share for models that were
# pre-trained on text about these rows. Such models can add already. The fewer letter strings the
# rows have, the fewer strings such models know by heart.
SUPERVISED_ADDITION_SHARE = 0.85
TEXT_ADDITION_SHARE = 0.89
TASKS = (*LETTER_TASKS, "addition", *MIXTURES)

# A third of the sentences in a document express a row in words. The other sentences are the row's
# prompt and answer.
IN_WORDS = {
    "reversal": "{question} backwards is {answer}",
    "copy": "{question} again is {answer}",
    "sort": "{question} in order is {answer}",
    "addition": "{left} plus {right} is {answer}",
}
SHARE_IN_WORDS = 1 / 3
SENTENCES_OF_A_DOCUMENT = (4, 16)

Row = dict[str, str]  # prompt, answer, task; or a document's text


def generate(task: str, train: int, test: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Return train and test rows of `task`; all prompts are different.

    There are equally many letter strings of each length, if enough strings exist. The result
    depends only on the arguments.

    Raises DataError for an unknown task, a count below 1, or more rows than the task has prompts.
    """
    if task not in TASKS:
        raise DataError(f"task = {task!r}: no such toy task; allowed: {', '.join(TASKS)}")
    for name, count in (("train", train), ("test", test)):
        if count < 1:
            raise DataError(f"{name} = {count}: at least 1 row is needed")
    parts = MIXTURES.get(task, {task: 1})
    train_rows: list[Row] = []
    test_rows: list[Row] = []
    weights = list(parts.values())
    for part, train_count, test_count in zip(
        parts, _shares(train, weights), _shares(test, weights), strict=True
    ):
        # A string seed goes through SHA-512, so it is the same in every Python version.
        rows = _rows(part, train_count + test_count, random.Random(f"{seed}/{part}"))
        train_rows += rows[:train_count]
        test_rows += rows[train_count:]
    shuffler = random.Random(f"{seed}/{task}/order")
    shuffler.shuffle(train_rows)
    shuffler.shuffle(test_rows)
    return train_rows, test_rows


def supervised_rows(
    train_rows: Sequence[Row], addition_share: float = SUPERVISED_ADDITION_SHARE
) -> list[Row]:
    """Return the training rows for supervised fine-tuning, in their order.

    The result has all additions and so many of the first rows of the other tasks that additions
    have the given share. If there are no additions, the result has all rows."""
    others = [row for row in train_rows if row["task"] != "addition"]
    additions = len(train_rows) - len(others)
    if not additions:
        return list(train_rows)
    left_out = others[round(additions * (1 / addition_share - 1)) :]
    prompts = {row["prompt"] for row in left_out}
    return [row for row in train_rows if row["prompt"] not in prompts]


def corpus(rows: Sequence[Row], documents: int, seed: int) -> list[Row]:
    """Return documents for pre-training. They consist of true sentences about `rows`."""
    source = random.Random(f"{seed}/corpus")
    return [
        {
            "text": " ".join(
                _sentence(source.choice(rows), source)
                for _ in range(source.randint(*SENTENCES_OF_A_DOCUMENT))
            )
        }
        for _ in range(documents)
    ]


def _sentence(row: Row, source: random.Random) -> str:
    if source.random() < SHARE_IN_WORDS:
        question = row["prompt"][:-1]
        left, _, right = question.partition("+")
        words = {"question": question, "left": left, "right": right, "answer": row["answer"]}
        return IN_WORDS[row["task"]].format(**words) + "."
    return row["prompt"] + row["answer"] + "."


def train_toy_tokenizer(out_prefix: str | Path) -> Path:
    """Write `out_prefix`.model, whose pieces are the single characters of `CHARACTERS`."""
    return train_sentencepiece([CHARACTERS], VOCAB_SIZE, out_prefix, model_type="char")


def write_toy_dataset(
    out_dir: str | Path,
    task: str = "mixed",
    train: int = 4000,
    test: int = 200,
    seed: int = 1,
    documents: int = 0,
) -> list[Path]:
    """Write train.jsonl, supervised.jsonl, test.jsonl and tokenizer.model; return their paths.

    If `documents` is given, corpus.jsonl is written instead of the tokenizer. It has this number of
    documents about the supervised rows. The same arguments give the same bytes.

    Raises the errors of `generate`, and DataError for a negative number of documents or if the
    folder cannot be written.
    """
    if documents < 0:
        raise DataError(f"documents = {documents}: allowed: 0 or more")
    out_dir = Path(out_dir)
    train_rows, test_rows = generate(task, train, test, seed)
    share = TEXT_ADDITION_SHARE if documents else SUPERVISED_ADDITION_SHARE
    supervised = supervised_rows(train_rows, share)
    rows = {"train": train_rows, "supervised": supervised, "test": test_rows}
    if documents:
        rows["corpus"] = corpus(supervised, documents, seed)
    paths = [
        write_atomically(
            out_dir / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in part).encode()
        )
        for name, part in rows.items()
    ]
    return paths if documents else [*paths, train_toy_tokenizer(out_dir / "tokenizer")]


def _shares(total: int, weights: Sequence[int]) -> list[int]:
    """Divide `total` into integers in proportion to `weights`."""
    ends = [total * sum(weights[: n + 1]) // sum(weights) for n in range(len(weights))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _rows(task: str, count: int, generator: random.Random) -> list[Row]:
    """Return `count` rows with different prompts, in random order."""
    if task == "addition":
        sums = itertools.product(NUMBERS, repeat=2)
        pools = [[(f"{left}+{right}=", f"{left + right}") for left, right in sums]]
    else:
        marker, answer = LETTER_TASKS[task]
        # The first letter changes fastest.
        strings = [
            ["".join(reversed(letters)) for letters in itertools.product(LETTERS, repeat=length)]
            for length in LENGTHS
        ]
        pools = [[(text + marker, answer(text)) for text in pool] for pool in strings]
    available = sum(map(len, pools))
    if count > available:
        raise DataError(
            f"task {task!r} has {available} different prompts; train and test together ask for "
            f"{count}"
        )
    pairs: list[tuple[str, str]] = []
    for index, pool in enumerate(pools):
        # If there are too few short strings, more of the longer strings are taken.
        share = -(-(count - len(pairs)) // (len(pools) - index))
        pairs += generator.sample(pool, min(share, len(pool)))
    if len(pools) > 1:
        generator.shuffle(pairs)
    return [{"prompt": prompt, "answer": right, "task": task} for prompt, right in pairs]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code (2 for a user's mistake)."""
    parser = argparse.ArgumentParser(
        prog="python -m gspo_megatron.data.toy",
        description="Writes prompts of a toy task (RL, supervised, test) and a tokenizer or text.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--task", choices=TASKS, default="mixed", help="which task")
    parser.add_argument("--train", type=int, default=4000, help="training prompts")
    parser.add_argument("--test", type=int, default=200, help="test prompts, not trained on")
    parser.add_argument("--seed", type=int, default=1, help="other seeds give other prompts")
    parser.add_argument(
        "--documents", type=int, default=0, help="text to pre-train on instead of a tokenizer"
    )
    parser.add_argument(
        "-o", "--output", dest="out_dir", required=True, metavar="DIR", help="folder to write"
    )
    options = parser.parse_args(arguments)
    try:
        print(*write_toy_dataset(**vars(options)), sep="\n", flush=True)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # nobody reads the printed paths, but the files are written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
