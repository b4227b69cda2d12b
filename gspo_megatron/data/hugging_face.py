"""A sentencepiece model as a folder that transformers loads without code of ours.

Transformers' own conversion wants protobuf and gives other ids than the model in corners: it lets
text spell byte and control pieces, and orders merges otherwise. What it needs to know is in
sentencepiece's public interface, so the `tokenizers` library is filled from there.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_megatron.errors import DataError
from gspo_megatron.files import write_atomically

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor
    from tokenizers import Tokenizer

SPACE = "▁"  # how pieces spell a space
# Spelling out one of these pieces in characters must always beat the piece, which is for nothing
# but its meaning: their characters are made part of the vocabulary.
BYTE_PIECE_CHARACTERS = "<0x123456789ABCDEF>"
MODEL_TYPES = ("unigram", "bpe", "char")


def save_hugging_face(
    model: str | Path,
    folder: str | Path,
    model_type: str,
    user_symbols: Sequence[str] = (),
) -> list[Path]:
    """Writes tokenizer.json and tokenizer_config.json; a chat_template.jinja may be beside them.

    `model`: a sentencepiece model without normalisation, with these `user_symbols` and with the
    characters of all its symbols among its pieces; a unigram model with exact scores. Returns the
    paths.

    Raises DataError where a file cannot be written.
    """
    import sentencepiece

    folder = Path(folder)
    processor = sentencepiece.SentencePieceProcessor(model_proto=Path(model).read_bytes())
    tokenizer = convert(processor, model_type, user_symbols)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{
            f"{name}_token": processor.id_to_piece(token_id)
            for name, token_id in (
                ("unk", processor.unk_id()),
                ("bos", processor.bos_id()),
                ("eos", processor.eos_id()),
                ("pad", processor.pad_id()),
            )
            if token_id >= 0
        },
    }
    files = {
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
    }
    return [write_atomically(folder / name, text.encode()) for name, text in files.items()]


def convert(
    processor: SentencePieceProcessor, model_type: str, user_symbols: Sequence[str]
) -> Tokenizer:
    """The same tokenizer in the `tokenizers` library."""
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers

    assert model_type in MODEL_TYPES, model_type
    size = processor.get_piece_size()
    pieces = [processor.id_to_piece(token_id) for token_id in range(size)]
    special = [n for n in range(size) if processor.is_control(n) or processor.is_unknown(n)]
    bytes_ = {n for n in range(size) if processor.is_byte(n)}
    symbols = set(user_symbols)
    normal = [n for n in range(size) if n not in {*special, *bytes_} and pieces[n] not in symbols]
    if model_type == "unigram":
        model = _unigram(processor, pieces, normal, symbols)
    else:
        model = _bpe(processor, pieces, normal, model_type)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(
        [AddedToken(pieces[n], special=True, normalized=False) for n in special]
    )
    if model_type != "unigram":  # a unigram model weighs them in its lattice
        tokenizer.add_tokens([AddedToken(text, normalized=False) for text in user_symbols])
    assert tokenizer.get_vocab_size() == size
    return tokenizer


def _unigram(
    processor: SentencePieceProcessor, pieces: list[str], normal: list[int], symbols: set[str]
) -> Any:
    from tokenizers import models

    scores = [processor.get_score(n) for n in range(len(pieces))]
    lowest = min(scores[n] for n in normal)
    ordinary = set(normal)
    vocabulary = [
        (piece, scores[n] if n in ordinary or piece in symbols else len(piece) * lowest - 1)
        for n, piece in enumerate(pieces)
    ]
    unk_id = processor.unk_id()
    return models.Unigram(vocabulary, unk_id=unk_id, byte_fallback=_spells_bytes(processor))


def _bpe(
    processor: SentencePieceProcessor, pieces: list[str], normal: list[int], model_type: str
) -> Any:
    from tokenizers import models

    known = {pieces[n] for n in normal}
    merges = []
    if model_type == "bpe":
        for n in sorted(normal, key=lambda n: (-processor.get_score(n), n)):
            # sentencepiece joins any two neighbours that make up a piece.
            for cut in range(len(pieces[n]) - 1, 0, -1):
                left, right = pieces[n][:cut], pieces[n][cut:]
                if left in known and right in known:
                    merges.append((left, right))
    return models.BPE(
        {piece: n for n, piece in enumerate(pieces)},
        merges,
        unk_token=processor.id_to_piece(processor.unk_id()),
        fuse_unk=True,
        byte_fallback=_spells_bytes(processor),
    )


def _spells_bytes(processor: SentencePieceProcessor) -> bool:
    return any(processor.is_byte(n) for n in range(processor.get_piece_size()))


def check_conversion(model: str | Path, folder: str | Path, texts: Iterable[str]) -> int:
    """Holds both forms against each other on `texts`; returns how many there were.

    Text counts as text and as what a chat template wrote, with control symbols. Raises DataError
    that shows the first text on which they differ.
    """
    from gspo_megatron.data.tokenizers import load_tokenizer

    ours, theirs = load_tokenizer(model), load_tokenizer(folder)
    count = 0
    for text in texts:
        if ours.encode_rendered(text).ids != theirs.encode_rendered(text).ids:
            raise DataError(
                f"{folder}: transformers' form gives other ids than {model} for {text[:200]!r}"
            )
        count += 1
    return count


def random_texts(symbols: Sequence[str], sample: Sequence[str], count: int) -> Iterable[str]:
    """Seeded texts that join words of `sample`, symbols, spaces and characters of all kinds."""
    source = random.Random(count)
    words = [word for line in sample[:100] for word in line.split()[:20]] or ["a"]
    kinds = (
        lambda: source.choice(words),
        lambda: source.choice(words)[: source.randint(1, 4)],
        lambda: source.choice(symbols) if symbols else "",
        lambda: source.choice(" \n\t\r") * source.randint(1, 5),
        lambda: chr(source.randint(1, 0x2FF)),
        lambda: chr(source.choice((0x3B1, 0x4E00, 0x1F600, 0x300, 0x200D)) + source.randint(0, 60)),
        lambda: f"<0x{source.randint(0, 255):02X}>",
    )
    for _ in range(count):
        yield "".join(source.choice(kinds)() for _ in range(source.randint(1, 30)))
