"""Make a tokenizer from a text, and the tokens of the text for pre-training.

    python tokenize_text.py DATA

reads DATA/corpus.jsonl, and writes DATA/tokenizer and DATA/corpus.bin and .idx, an indexed dataset
of Megatron-Core. The script shows the format; for large corpora use tools/preprocess_data.py of
Megatron-LM, which works in many processes (docs/data.md).
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

from gspo_megatron.data.character_tokenizer import write_character_tokenizer
from gspo_megatron.data.tokenizers import load_tokenizer
from gspo_megatron.observe.metrics_files import read_json_lines
from gspo_megatron.platform.quiet import quiet_imports
from gspo_megatron.process.failures import run_script

with quiet_imports():
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DATA")
    folder = parser.parse_args().folder
    texts = [line["text"] for line in read_json_lines(folder / "corpus.jsonl")]
    model = write_character_tokenizer(folder / "tokenizer", texts, 48, byte_fallback=False)
    tokenizer = load_tokenizer(model)
    print(f"{model}: {tokenizer.vocab_size} pieces")

    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    builder = IndexedDatasetBuilder(str(folder / "corpus.bin"), dtype=dtype)
    tokens = 0
    for ids in tokenizer.encode_all(texts):
        document = torch.tensor([*ids, tokenizer.eos_id])
        builder.add_document(document, [len(document)])
        tokens += len(document)
    builder.finalize(str(folder / "corpus.idx.partial"))
    os.replace(folder / "corpus.idx.partial", folder / "corpus.idx")  # now the dataset is complete
    print(f"{folder}/corpus.bin: {len(texts):,} documents, {tokens:,} tokens")


if __name__ == "__main__":
    sys.exit(run_script(main))
