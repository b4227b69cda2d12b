"""Text to tokens for pre-training: Megatron-Core's indexed dataset, PREFIX.bin and PREFIX.idx.

    python tools/prepare_data.py INPUT... --tokenizer TOKENIZER -o PREFIX [--workers 8]
        [--text-field text] [--end-of-document SYMBOL] [--deduplicate]

Reads JSON Lines, Parquet and text files (.txt, .md: a document per line, or --text-documents file).
Every document ends with the tokenizer's end-of-sequence token or another symbol. PREFIX.json
describes the files and has their checksums. The same command continues an interrupted run; the
result does not depend on interruptions or the number of workers.

    python tools/prepare_data.py --check PREFIX [--vocab-size N]

This reads a dataset and checks that its files belong together and fit the model's vocabulary.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

from gspo_megatron.data.corpus import CorpusJob, prepare
from gspo_megatron.data.documents import CHUNK_BYTES, TEXT_DOCUMENTS
from gspo_megatron.data.indexed import Manifest, check_dataset, prefix_of, validate_tokens
from gspo_megatron.errors import DataError
from gspo_megatron.observe.progress import Progress
from gspo_megatron.process.failures import exit_code_of, make_streams_safe


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="prepare_data.py",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("inputs", nargs="*", default=[], metavar="INPUT", help="files of text")
    parser.add_argument("--tokenizer", help="a sentencepiece model or a Hugging Face folder")
    parser.add_argument(
        "-o",
        "--output",
        metavar="PREFIX",
        help="writes PREFIX.bin, .idx and .json; PREFIX may also be the path of one of them",
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--text-field", default="text", help="of JSON Lines and Parquet")
    parser.add_argument(
        "--text-documents", choices=TEXT_DOCUMENTS, default="line", help="what a document is"
    )
    parser.add_argument(
        "--end-of-document", metavar="SYMBOL", help="instead of the end-of-sequence token"
    )
    parser.add_argument(
        "--deduplicate", action="store_true", help="leave out duplicates of earlier documents"
    )
    parser.add_argument(
        "--chunk-bytes", type=int, default=CHUNK_BYTES, help="input that a worker reads at once"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a dataset")
    parser.add_argument("--check", metavar="PREFIX", help="check a dataset instead")
    parser.add_argument("--vocab-size", type=int, help="vocabulary of the model, for --check")
    options = parser.parse_args(arguments)
    wanted = (options.inputs, options.tokenizer, options.output)
    if options.check is None and not all(wanted):
        parser.error("give INPUT, --tokenizer and --output, or --check")
    if options.check is None and options.vocab_size is not None:
        parser.error("--vocab-size needs --check: a new dataset has the ids of its tokenizer")
    if options.check is not None and any(
        value != parser.get_default(name)
        for name, value in vars(options).items()
        if name not in ("check", "vocab_size")
    ):
        parser.error("--check takes only --vocab-size")
    for name in ("output", "check"):
        if getattr(options, name) is not None:
            try:
                setattr(options, name, prefix_of(getattr(options, name)))
            except DataError as error:
                parser.error(f"--{name} {error}")
    for name in ("workers", "chunk_bytes"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: must be at least 1")
    return options


def check(prefix: str, vocab_size: int | None) -> int:
    manifest = check_dataset(prefix, vocab_size)
    if manifest is not None:
        validate_tokens(prefix, manifest.vocab_size, manifest.eod_id)
        print(summary(manifest))
    elif vocab_size is not None:
        validate_tokens(prefix, vocab_size)
        print(f"vocab_size={vocab_size}")
    return 0


def summary(manifest: Manifest) -> str:
    return (
        f"documents={manifest.documents} tokens={manifest.tokens} dtype={manifest.dtype} "
        f"vocab_size={manifest.vocab_size} largest_token={manifest.largest_token} "
        f"empty_documents={manifest.empty_documents} duplicates={manifest.duplicates}"
    )


def run(options: argparse.Namespace) -> int:
    job = CorpusJob(
        inputs=options.inputs,
        tokenizer=options.tokenizer,
        prefix=options.output,
        text_field=options.text_field,
        text_documents=options.text_documents,
        end_of_document=options.end_of_document,
        deduplicate=options.deduplicate,
        chunk_bytes=options.chunk_bytes,
    )
    start = time.perf_counter()
    progress: Progress | None = None
    with ExitStack() as stack:

        def on_chunk(done: int, total: int) -> None:
            nonlocal progress
            if progress is not None:
                progress.update(done, {})
                return
            progress = stack.enter_context(Progress(total, "tokenize", initial_step=done))
            if done:
                progress.note(f"{done} of {total} chunks were done before")

        manifest = prepare(job, options.workers, options.overwrite, on_chunk)
    seconds = time.perf_counter() - start
    print(f"{summary(manifest)} seconds={seconds:.1f}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code (2 for a user's mistake)."""
    make_streams_safe()
    options = parse(arguments)
    if options.check is not None:
        return exit_code_of(lambda: check(options.check, options.vocab_size))
    return exit_code_of(lambda: run(options), interrupted="interrupted; the same command continues")


if __name__ == "__main__":
    sys.exit(main())
