"""A tokenizer from files of text, in the forms of sentencepiece and of transformers."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gspo_megatron.data.chat import CHATML, TEMPLATE_FILE, template_fault, written_symbols
from gspo_megatron.data.documents import read_documents, sentences
from gspo_megatron.data.rows import Problems
from gspo_megatron.data.tokenizers import (
    HUGGING_FACE_FILES,
    load_tokenizer,
    special_pieces,
    train_sentencepiece,
)
from gspo_megatron.errors import DataError
from gspo_megatron.files import make_folder, write_atomically

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor
    from tokenizers import Tokenizer

MODEL_FILE = "tokenizer.model"
NORMALIZATIONS = ("identity", "nfkc", "nfkc_cf", "nmt_nfkc", "nmt_nfkc_cf")
CHATML_SYMBOLS = ("<|im_start|>", "<|im_end|>")  # the second one ends a sequence
_UNKNOWN, _PADDING = "<unk>", "<pad>"
_CHECKED_TEXTS = 400
_SAMPLED_LINES = 200
_LARGEST_NUMBER = 2**31 - 1  # of sentencepiece
SPACE = "▁"  # how pieces spell a space
# Text such as "<0x41>" must become characters, never the piece for that byte: so these characters
# must all be in the vocabulary.
BYTE_PIECE_CHARACTERS = "<0x123456789ABCDEF>"
MODEL_TYPES = ("unigram", "bpe", "char")

STEP = 64  # exact scores are multiples of 1 / STEP: float32 sums are exact up to 2**24 / STEP
# The score of a user symbol, which beats every other path. Sentencepiece's own bonus for symbols is
# no multiple of 1 / STEP, and too small if another piece holds the symbol's beginning.
SYMBOL_SCORE = 64.0
_SCORE_KEY, _TYPE_KEY = b"\x15", b"\x18"  # of sentencepiece's protocol buffer
_NORMAL = 1  # a type of pieces


@dataclass(frozen=True)
class TokenizerRecipe:
    """How to train a tokenizer."""

    vocab_size: int  # at most, symbols and bytes included
    model_type: str = "unigram"
    byte_fallback: bool = True  # characters outside the vocabulary are spelled in bytes
    user_symbols: Sequence[str] = ()  # one token each, in any text
    control_symbols: Sequence[str] = ()  # one token each, only where a chat template writes them
    eos_symbol: str = "</s>"
    chat_template: str | None = None  # Jinja
    normalization: str = "identity"
    character_coverage: float = 1.0  # share of the text's characters that get pieces
    max_sentences: int = 0  # drawn at random for training; 0: all. They are held in memory.
    text_field: str = "text"

    @property
    def all_symbols(self) -> list[str]:
        control = [_UNKNOWN, _PADDING, self.eos_symbol, *self.control_symbols]
        return [*control, *self.user_symbols]


def with_chatml(recipe: TokenizerRecipe) -> TokenizerRecipe:
    """The recipe with the ChatML template and its symbols."""
    start, end = CHATML_SYMBOLS
    control = (*recipe.control_symbols, start)
    return replace(recipe, control_symbols=control, eos_symbol=end, chat_template=CHATML)


def train_tokenizer(
    inputs: Sequence[str | Path],
    folder: str | Path,
    recipe: TokenizerRecipe,
    overwrite: bool = False,
) -> list[Path]:
    """Trains on text, JSON Lines and Parquet files; returns the paths of the files written.

    They are tokenizer.model for sentencepiece; unless text is normalised, tokenizer.json and
    tokenizer_config.json for transformers; and the chat template if there is one. Both forms give
    the same ids, which is checked on text from the files and on random text.

    Raises DataError for bad input (file and line), wrong settings of the recipe, a folder that
    cannot be written or already has a tokenizer (unless `overwrite`).
    """
    check_recipe(recipe)
    folder = Path(folder)
    if folder.name in ("", ".."):  # Path(".") has no name, and the staging folder needs one
        folder = folder.resolve()
    if (folder / MODEL_FILE).exists() and not overwrite:
        raise DataError(f"{folder / MODEL_FILE}: exists already; --overwrite replaces it")
    staging = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        staging.mkdir(parents=True)
    except OSError as error:
        raise DataError(f"{folder}: cannot be written: {error.strerror or error}") from error
    difference = None
    try:
        made, lines = _train_into(staging, inputs, recipe)
        if recipe.normalization == "identity":
            try:
                model = staging / MODEL_FILE
                form = save_hugging_face(model, staging, recipe.model_type, recipe.user_symbols)
                texts = random_texts(recipe.all_symbols, lines, _CHECKED_TEXTS)
                check_conversion(model, staging, [*lines, *texts])
                made += form
            except DataError as error:  # training may have taken hours: the model is kept
                difference = DataError(f"{error}; only the sentencepiece model was written")
        make_folder(folder)
        for name in (TEMPLATE_FILE, *HUGGING_FACE_FILES):  # of a tokenizer that this one replaces
            (folder / name).unlink(missing_ok=True)
        for path in made:
            os.replace(path, folder / path.name)
        if difference is not None:
            raise difference
    except DataError as error:
        raise DataError(str(error).replace(str(staging), str(folder))) from error
    except OSError as error:
        raise DataError(f"{folder}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return [folder / path.name for path in made]


def check_recipe(recipe: TokenizerRecipe) -> None:
    """Raises DataError with all problems of a recipe."""
    problems = Problems(shown=20)
    if not 4 <= recipe.vocab_size <= _LARGEST_NUMBER:
        problems.add(f"vocab_size = {recipe.vocab_size}", "legal: 4 or more, in 32 bits")
    if not 0 <= recipe.max_sentences <= _LARGEST_NUMBER:
        problems.add(f"max_sentences = {recipe.max_sentences}", "legal: 0 or more, in 32 bits")
    for name, value, legal in (
        ("model_type", recipe.model_type, MODEL_TYPES),
        ("normalization", recipe.normalization, NORMALIZATIONS),
    ):
        if value not in legal:
            problems.add(f"{name} = {value!r}", f"legal: {', '.join(legal)}")
    if not 0.9 <= recipe.character_coverage <= 1:
        problems.add(f"character_coverage = {recipe.character_coverage}", "legal: 0.9 to 1")
    symbols = recipe.all_symbols
    for symbol, count in Counter(symbols).items():
        if count > 1:
            problems.add(f"symbol {symbol!r}", "is there twice")
        if not symbol or " " in symbol or SPACE in symbol:
            problems.add(f"symbol {symbol!r}", "a symbol is not empty and has no space")
        if len(symbol) == 1 and symbol not in recipe.user_symbols:
            problems.add(f"symbol {symbol!r}", "a control symbol has 2 characters or more")
    fault = template_fault(recipe.chat_template or "")
    if fault is not None:
        problems.add("chat_template", f"not valid Jinja: {fault}")
    for symbol in written_symbols(recipe.chat_template or ""):
        if symbol not in symbols:
            problems.add(
                "chat_template", f"writes {symbol}, which is not one of the symbols: add it to them"
            )
    problems.raise_if_any()


def _train_into(
    folder: Path, inputs: Sequence[str | Path], recipe: TokenizerRecipe
) -> tuple[list[Path], list[str]]:
    """Paths of the sentencepiece model and the chat template, and some lines of the text."""
    import sentencepiece

    sentencepiece.set_random_generator_seed(1)  # for the draw of sentences
    lines = sentences(read_documents(inputs, recipe.text_field))
    sample = list(itertools.islice(lines, _SAMPLED_LINES))
    if not sample:
        raise DataError(f"{', '.join(map(str, inputs))}: no text to train on")
    symbols = recipe.all_symbols
    required = "\n" + "".join(symbols)
    if recipe.byte_fallback:
        required += BYTE_PIECE_CHARACTERS
    model = train_sentencepiece(
        itertools.chain(sample, lines),
        recipe.vocab_size,
        folder / Path(MODEL_FILE).stem,
        recipe.model_type,
        byte_fallback=recipe.byte_fallback,
        unk_piece=_UNKNOWN,
        pad_piece=_PADDING,
        eos_piece=recipe.eos_symbol,
        control_symbols=list(recipe.control_symbols),
        user_defined_symbols=list(recipe.user_symbols),
        # A symbol of one character is a piece already.
        required_chars="".join(sorted({*required} - {*recipe.user_symbols})),
        normalization_rule_name=recipe.normalization,
        character_coverage=recipe.character_coverage,
        input_sentence_size=recipe.max_sentences,
        shuffle_input_sentence=recipe.max_sentences > 0,
    )
    if recipe.model_type == "unigram" and recipe.normalization == "identity":
        write_atomically(model, with_exact_scores(model.read_bytes(), recipe.user_symbols))
    tokenizer = load_tokenizer(model)
    for symbol in symbols:
        ids = tokenizer.encode_rendered(symbol).ids
        if ids != [tokenizer.symbol_id(symbol)]:
            raise DataError(f"{model}: symbol {symbol!r} is not one token: {ids}")
    if recipe.chat_template is None:
        return [model], sample
    template = write_atomically(folder / TEMPLATE_FILE, recipe.chat_template.encode())
    return [model, template], sample


# The form for transformers. Its own conversion needs protobuf, and its ids differ in rare cases:
# text can spell byte and control pieces there, and merges are in another order. So the tokenizer is
# built from what sentencepiece's public interface says about the model.


def save_hugging_face(
    model: Path, folder: Path, model_type: str, user_symbols: Sequence[str] = ()
) -> list[Path]:
    """Writes tokenizer.json and tokenizer_config.json of a sentencepiece model without
    normalisation, whose pieces include the characters of all its symbols; returns their paths. A
    unigram model must have exact scores."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=model.read_bytes())
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **special_pieces(processor),
    }
    files = {
        "tokenizer.json": convert(processor, model_type, user_symbols).to_str(pretty=True),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
    }
    return [write_atomically(folder / name, text.encode()) for name, text in files.items()]


def convert(
    processor: SentencePieceProcessor, model_type: str, user_symbols: Sequence[str]
) -> Tokenizer:
    """The same tokenizer in the `tokenizers` library."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    size = processor.get_piece_size()
    pieces = [processor.id_to_piece(token_id) for token_id in range(size)]
    special = [n for n in range(size) if processor.is_control(n) or processor.is_unknown(n)]
    bytes_ = {n for n in range(size) if processor.is_byte(n)}
    symbols, unk_id = set(user_symbols), processor.unk_id()
    normal = [n for n in range(size) if n not in {*special, *bytes_} and pieces[n] not in symbols]
    if model_type == "unigram":
        scores = [processor.get_score(n) for n in range(size)]
        lowest, kept = min(scores[n] for n in normal), {*normal}
        vocabulary = [
            (piece, scores[n] if n in kept or piece in symbols else len(piece) * lowest - 1)
            for n, piece in enumerate(pieces)
        ]
        model = models.Unigram(vocabulary, unk_id=unk_id, byte_fallback=bool(bytes_))
    else:
        model = models.BPE(
            {piece: n for n, piece in enumerate(pieces)},
            _merges(processor, pieces, normal) if model_type == "bpe" else [],
            unk_token=pieces[unk_id],
            fuse_unk=True,
            byte_fallback=bool(bytes_),
        )
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


def _merges(
    processor: SentencePieceProcessor, pieces: list[str], normal: list[int]
) -> list[tuple[str, str]]:
    known = {pieces[n] for n in normal}
    merges = []
    for n in sorted(normal, key=lambda n: (-processor.get_score(n), n)):
        # Sentencepiece joins any two neighbours that make up a piece.
        for cut in range(len(pieces[n]) - 1, 0, -1):
            left, right = pieces[n][:cut], pieces[n][cut:]
            if left in known and right in known:
                merges.append((left, right))
    return merges


def with_exact_scores(model: bytes, user_symbols: Collection[str]) -> bytes:
    """A unigram model with rounded scores, in which `user_symbols` always win.

    A unigram tokenizer takes the path of pieces with the greatest sum of scores. Of equal sums
    rounding decides: sentencepiece adds in float32, transformers in float64, and their ids differ.
    Multiples of 1 / STEP are added without rounding in both.

    The model file is a protocol buffer: a piece's text, a key and its score as float32; unless the
    piece is a normal one, then another key and its type. Scores and types are changed in place.
    """
    from sentencepiece import SentencePieceProcessor

    processor, changed, at = SentencePieceProcessor(model_proto=model), bytearray(model), 0
    for n in range(processor.get_piece_size()):
        text, score = processor.id_to_piece(n), processor.get_score(n)
        begin = text.encode() + _SCORE_KEY
        at = changed.index(begin + struct.pack("<f", score), at) + len(begin)
        if text in user_symbols:
            score = SYMBOL_SCORE
            assert changed[at + 4 : at + 5] == _TYPE_KEY
            changed[at + 5] = _NORMAL
        struct.pack_into("<f", changed, at, round(score * STEP) / STEP)
    return bytes(changed)


def check_conversion(model: str | Path, folder: str | Path, texts: Iterable[str]) -> None:
    """Compares both forms on `texts`, which may hold control symbols.

    Raises DataError that shows the first text with different ids.
    """
    ours, theirs = load_tokenizer(model), load_tokenizer(folder)
    for text in texts:
        if ours.encode_rendered(text).ids != theirs.encode_rendered(text).ids:
            raise DataError(
                f"{folder}: the form for transformers gives other ids than {model} for "
                f"{text[:200]!r}"
            )


def random_texts(symbols: Sequence[str], sample: Sequence[str], count: int) -> Iterable[str]:
    """Random texts of words of `sample`, symbols, spaces and characters of all kinds, seeded."""
    source = random.Random(count)
    words = [word for line in sample[:100] for word in line.split()[:20]] or ["a"]
    kinds = (
        lambda: source.choice(words),
        lambda: source.choice(words)[: source.randint(1, 4)],
        lambda: source.choice(symbols),
        lambda: source.choice(" \n\t\r") * source.randint(1, 5),
        lambda: chr(source.randint(1, 0x2FF)),
        lambda: chr(source.choice((0x3B1, 0x4E00, 0x1F600, 0x300, 0x200D)) + source.randint(0, 60)),
        lambda: f"<0x{source.randint(0, 255):02X}>",
    )
    for _ in range(count):
        yield "".join(source.choice(kinds)() for _ in range(source.randint(1, 30)))
