"""A sentencepiece model as a folder that transformers loads without our code, with the same ids.

Transformers' own conversion needs protobuf, and its ids differ from the model's in rare cases: text
can spell byte and control pieces there, and merges are in another order. So the tokenizer is built
with the `tokenizers` library, from what sentencepiece's public interface says about the model.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_megatron.data.tokenizers import load_tokenizer, special_pieces
from gspo_megatron.errors import DataError
from gspo_megatron.files import write_atomically

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor
    from tokenizers import Tokenizer

SPACE = "▁"  # how pieces spell a space
# Text such as "<0x41>" must become characters, never the piece for that byte: so these characters
# must all be in the vocabulary.
BYTE_PIECE_CHARACTERS = "<0x123456789ABCDEF>"
MODEL_TYPES = ("unigram", "bpe", "char")

STEP = 64  # exact scores are multiples of 1 / STEP: float32 sums are exact up to 2**24 / STEP
# The score of a user symbol, which beats every other path. Sentencepiece's own bonus for symbols is
# no multiple of 1 / STEP, and too small if another piece holds the symbol's beginning.
SYMBOL_SCORE = 64.0
_PIECES, _PIECE, _SCORE, _TYPE = 1, 1, 2, 3  # field numbers of the protocol buffer
_NORMAL = 1  # a type of pieces
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types


def with_exact_scores(model: bytes, user_symbols: Collection[str]) -> bytes:
    """A unigram model with rounded scores, in which `user_symbols` always win.

    A unigram tokenizer takes the path of pieces with the greatest sum of scores. In a run of one
    character ("-----" of "--" and "---") many paths have equal sums, and rounding decides between
    them: sentencepiece adds in float32, transformers in float64, and their ids differ. Multiples of
    1 / STEP are added without rounding in both.

    The model file is a protocol buffer; scores and types are changed in place.
    """
    changed = bytearray(model)
    for number, start, end in _fields(model, 0, len(model)):
        if number != _PIECES:
            continue
        places = {field: (first, last) for field, first, last in _fields(model, start, end)}
        text = model[slice(*places[_PIECE])].decode()
        (score,) = struct.unpack("<f", model[slice(*places[_SCORE])])
        if text in user_symbols:
            score = SYMBOL_SCORE
            changed[slice(*places[_TYPE])] = bytes([_NORMAL])
        changed[slice(*places[_SCORE])] = struct.pack("<f", round(score * STEP) / STEP)
    assert len(changed) == len(model)
    return bytes(changed)


def _fields(message: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The fields in message[at:end]: the number of each, and where its value starts and ends."""
    while at < end:
        key, at = _varint(message, at)
        wire_type, start = key & 7, at
        if wire_type == _VARINT:
            _, at = _varint(message, at)
        elif wire_type == _BYTES:
            length, start = _varint(message, at)
            at = start + length
        else:
            at += {_FIXED64: 8, _FIXED32: 4}[wire_type]
        yield key >> 3, start, at


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """The number at `at`, and where it ends."""
    value = shift = 0
    while True:
        value |= (message[at] & 0x7F) << shift
        shift += 7
        at += 1
        if message[at - 1] < 0x80:
            return value, at


def save_hugging_face(
    model: str | Path,
    folder: str | Path,
    model_type: str,
    user_symbols: Sequence[str] = (),
) -> list[Path]:
    """Writes tokenizer.json and tokenizer_config.json to `folder`; returns their paths.

    `model`: a sentencepiece model without normalisation and with these `user_symbols`, whose pieces
    include the characters of all its symbols; a unigram model must have exact scores.

    Raises DataError if a file cannot be written.
    """
    import sentencepiece

    folder = Path(folder)
    processor = sentencepiece.SentencePieceProcessor(model_proto=Path(model).read_bytes())
    tokenizer = convert(processor, model_type, user_symbols)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **special_pieces(processor),
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
    if model_type != "unigram":  # a unigram model has them among its pieces
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
            # Sentencepiece joins any two neighbours that make up a piece.
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
    """Compares both forms on `texts`, which may hold control symbols; returns their number.

    Raises DataError that shows the first text with different ids.
    """
    ours, theirs = load_tokenizer(model), load_tokenizer(folder)
    count = 0
    for text in texts:
        if ours.encode_rendered(text).ids != theirs.encode_rendered(text).ids:
            raise DataError(
                f"{folder}: the form for transformers gives other ids than {model} for "
                f"{text[:200]!r}"
            )
        count += 1
    return count


def random_texts(symbols: Sequence[str], sample: Sequence[str], count: int) -> Iterable[str]:
    """Random texts of words of `sample`, symbols, spaces and characters of all kinds, seeded."""
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
