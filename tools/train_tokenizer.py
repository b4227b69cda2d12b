"""Trains a tokenizer for this package and for transformers.

    python tools/train_tokenizer.py INPUT... -o FOLDER --vocab-size 32000
        [--model-type unigram|bpe|char] [--chat-template chatml|FILE.jinja]
        [--control-symbols '<|tool|>' ...] [--user-symbols ...]

Reads text (.txt, .md), JSON Lines and Parquet files line by line. data.tokenizer takes
FOLDER/tokenizer.model or FOLDER; transformers' AutoTokenizer takes FOLDER. The tool checks that
both give the same ids. With --normalization it writes only the sentencepiece model.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gspo_megatron.data.tokenizer_training import (
    MODEL_FILE,
    MODEL_TYPES,
    NORMALIZATIONS,
    TokenizerRecipe,
    train_tokenizer,
    with_chatml,
)
from gspo_megatron.data.tokenizers import load_tokenizer
from gspo_megatron.errors import DataError
from gspo_megatron.process.failures import exit_code_of, make_streams_safe


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="train_tokenizer.py",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="files of text")
    parser.add_argument("-o", "--output", required=True, metavar="FOLDER")
    parser.add_argument("--vocab-size", type=int, required=True, help="the largest number of ids")
    parser.add_argument("--model-type", choices=MODEL_TYPES, default="unigram")
    parser.add_argument(
        "--byte-fallback",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="spell unknown characters in bytes",
    )
    parser.add_argument("--user-symbols", nargs="+", default=[], help="one token each, in any text")
    parser.add_argument(
        "--control-symbols", nargs="+", default=[], help="one token each, in chat templates only"
    )
    parser.add_argument("--eos-symbol", default=TokenizerRecipe.eos_symbol, help="ends a sequence")
    parser.add_argument(
        "--chat-template", metavar="chatml|FILE", help="a Jinja file, or ChatML with its symbols"
    )
    parser.add_argument("--normalization", choices=NORMALIZATIONS, default="identity")
    parser.add_argument("--character-coverage", type=float, default=1.0)
    parser.add_argument(
        "--max-sentences", type=int, default=0, help="lines drawn at random for training; 0: all"
    )
    parser.add_argument("--text-field", default="text", help="of JSON Lines and Parquet")
    parser.add_argument("--overwrite", action="store_true", help="replace a tokenizer")
    return parser.parse_args(arguments)


def recipe_of(options: argparse.Namespace) -> TokenizerRecipe:
    template = options.chat_template
    recipe = TokenizerRecipe(
        vocab_size=options.vocab_size,
        model_type=options.model_type,
        byte_fallback=options.byte_fallback,
        user_symbols=options.user_symbols,
        control_symbols=options.control_symbols,
        eos_symbol=options.eos_symbol,
        chat_template=None if template in (None, "chatml") else read_text(Path(template)),
        normalization=options.normalization,
        character_coverage=options.character_coverage,
        max_sentences=options.max_sentences,
        text_field=options.text_field,
    )
    return with_chatml(recipe) if template == "chatml" else recipe


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a readable template: {error}") from error


def run(options: argparse.Namespace) -> int:
    start = time.perf_counter()
    paths = train_tokenizer(options.inputs, options.output, recipe_of(options), options.overwrite)
    tokenizer = load_tokenizer(Path(options.output) / MODEL_FILE)
    for path in paths:
        print(path)
    if len(paths) < 3:
        print("No files for transformers: the tokenizer normalises text.")
    print(
        f"vocab_size={tokenizer.vocab_size} eos_id={tokenizer.eos_id} pad_id={tokenizer.pad_id} "
        f"seconds={time.perf_counter() - start:.1f}"
    )
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code (2 for a user's mistake)."""
    make_streams_safe()
    options = parse(arguments)
    return exit_code_of(lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
