"""Throughput of prepare_data and of a plain loop over a transformers tokenizer, in one run.

    python tools/bench_prepare_data.py [--megabytes 20] [--workers 2] [--repeats 3]
                                       [--tokenizer FOLDER --input FILE.jsonl]

Without --tokenizer and --input the script generates a corpus of words and trains a tokenizer on it.
The loop reads the same file in one process, encodes one document at a time with AutoTokenizer,
keeps the ids in memory and writes nothing. The time of prepare_data includes the start of its
processes, publication and validation; imports of Megatron-Core and transformers are not timed. Both
must give the same tokens. Megatron-LM's own preprocess_data.py is not part of the megatron-core
wheel, so it is not measured here.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gspo_megatron.data.corpus import CorpusJob, prepare
from gspo_megatron.data.indexed import read_index
from gspo_megatron.data.tokenizer_training import TokenizerRecipe, train_tokenizer
from gspo_megatron.data.tokenizers import load_tokenizer

TEXT_FIELD = "text"


def make_corpus(path: Path, megabytes: float, seed: int = 1) -> None:
    """Documents of 20 to 2000 words; the n-th most frequent word has a share of 1 / n."""
    source = random.Random(seed)
    letters = "etaoinshrdlucmfwypvbgk"
    words = ["".join(source.choices(letters, k=source.randint(1, 10))) for _ in range(20_000)]
    weights = list(itertools.accumulate(1 / n for n in range(1, len(words) + 1)))
    written = 0
    with path.open("w") as file:
        while written < megabytes * 1e6:
            chosen = source.choices(words, cum_weights=weights, k=source.randint(20, 2000))
            text = " ".join(chosen)
            written += file.write(json.dumps({TEXT_FIELD: f"{text}.\n"}) + "\n")


def plain_loop(tokenizer: Any, path: Path) -> list[int]:
    """All tokens, each document ended by the end-of-sequence token."""
    tokens: list[int] = []
    with path.open() as file:
        for line in file:
            text = json.loads(line)[TEXT_FIELD]
            tokens += tokenizer(text, add_special_tokens=False)["input_ids"]
            tokens.append(tokenizer.eos_token_id)
    return tokens


def timed(action: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = action()
    return result, time.perf_counter() - start


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=20, help="size of the generated corpus")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side")
    parser.add_argument("--vocab-size", type=int, default=8000)
    parser.add_argument("--model-type", default="unigram", choices=("unigram", "bpe"))
    parser.add_argument("--tokenizer", type=Path, help="a Hugging Face folder")
    parser.add_argument("--input", type=Path, help="JSON Lines with a field 'text'")
    options = parser.parse_args()
    if (options.tokenizer is None) != (options.input is None):
        parser.error("--tokenizer and --input go together")
    return options


def main() -> int:
    options = parse()
    # Not at the top: the worker processes import this file and do not need these imports.
    from transformers import AutoTokenizer

    importlib.import_module("gspo_megatron.data.corpus_files")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus, tokenizer = options.input, options.tokenizer
        if corpus is None:
            corpus, tokenizer = folder / "corpus.jsonl", folder / "tokenizer"
            make_corpus(corpus, options.megabytes)
            recipe = TokenizerRecipe(
                options.vocab_size, options.model_type, max_sentences=20_000, text_field=TEXT_FIELD
            )
            train_tokenizer([corpus], tokenizer, recipe)
        # Our tool takes the sentencepiece model where there is one.
        model = tokenizer / "tokenizer.model"
        ours_from = model if model.is_file() else tokenizer
        theirs = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
        assert load_tokenizer(ours_from).eos_id == theirs.eos_token_id
        seconds: dict[str, list[float]] = {"prepare_data": [], "loop": []}
        for n in range(options.repeats):
            job = CorpusJob([str(corpus)], str(ours_from), str(folder / f"run{n}"), TEXT_FIELD)
            _, took = timed(lambda job=job: prepare(job, options.workers))
            seconds["prepare_data"].append(took)
            tokens, took = timed(lambda: plain_loop(theirs, corpus))
            seconds["loop"].append(took)
            written = np.fromfile(f"{job.prefix}.bin", read_index(f"{job.prefix}.idx").dtype)
            if not np.array_equal(written, np.array(tokens)):
                print("the tokens differ", file=sys.stderr)
                return 1
        size = corpus.stat().st_size / 1e6
    ours, loop = (statistics.median(seconds[name]) for name in ("prepare_data", "loop"))
    print(
        "Compared with a loop over a transformers tokenizer: Megatron-LM's preprocess_data.py is "
        "not in the megatron-core wheel."
    )
    print(
        f"megabytes={size:.1f} tokens={len(tokens)} workers={options.workers} "
        f"prepare_data_seconds={ours:.2f} loop_seconds={loop:.2f} "
        f"prepare_data_tokens_per_second={len(tokens) / ours:.0f} "
        f"loop_tokens_per_second={len(tokens) / loop:.0f} speedup={loop / ours:.2f} same_tokens=1"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
