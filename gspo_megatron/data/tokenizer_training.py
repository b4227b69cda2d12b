"""A tokenizer from files of text, in the forms of sentencepiece and of transformers."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gspo_megatron.data.chat import CHATML, TEMPLATE_FILE, template_fault, written_symbols
from gspo_megatron.data.documents import read_documents, sentences
from gspo_megatron.data.hugging_face import (
    BYTE_PIECE_CHARACTERS,
    MODEL_TYPES,
    SPACE,
    check_conversion,
    random_texts,
    save_hugging_face,
    with_exact_scores,
)
from gspo_megatron.data.rows import Problems
from gspo_megatron.data.tokenizers import HUGGING_FACE_FILES, load_tokenizer, train_sentencepiece
from gspo_megatron.errors import DataError
from gspo_megatron.files import write_atomically

MODEL_FILE = "tokenizer.model"
NORMALIZATIONS = ("identity", "nfkc", "nfkc_cf", "nmt_nfkc", "nmt_nfkc_cf")
CHATML_SYMBOLS = ("<|im_start|>", "<|im_end|>")  # the second one ends a sequence
_UNKNOWN, _PADDING = "<unk>", "<pad>"
_CHECKED_TEXTS = 400
_SAMPLED_LINES = 200
_LARGEST_NUMBER = 2**31 - 1  # of sentencepiece


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
                made += _convert(staging, recipe, lines)
            except DataError as error:  # training may have taken hours: the model is kept
                difference = error
        folder.mkdir(exist_ok=True)
        for name in (TEMPLATE_FILE, *HUGGING_FACE_FILES):  # of a tokenizer that this one replaces
            (folder / name).unlink(missing_ok=True)
        for path in made:
            os.replace(path, folder / path.name)
    except DataError as error:
        raise DataError(str(error).replace(str(staging), str(folder))) from error
    except OSError as error:
        raise DataError(f"{folder}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    if difference is not None:
        text = str(difference).replace(str(staging), str(folder))
        raise DataError(f"{text}; only the sentencepiece model was written")
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
    reserved = _control_symbols(recipe)
    symbols = [*reserved, *recipe.user_symbols]
    for symbol, count in Counter(symbols).items():
        if count > 1:
            problems.add(f"symbol {symbol!r}", "is there twice")
        if not symbol or " " in symbol or SPACE in symbol:
            problems.add(f"symbol {symbol!r}", "a symbol is not empty and has no space")
        if len(symbol) == 1 and symbol in reserved:
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
    sample: list[str] = []
    lines = _sampled(sentences(read_documents(inputs, recipe.text_field)), sample)
    symbols = [*_control_symbols(recipe), *recipe.user_symbols]
    required = "\n" + "".join(symbols)
    if recipe.byte_fallback:
        required += BYTE_PIECE_CHARACTERS
    model = train_sentencepiece(
        lines,
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
    if not sample:
        raise DataError(f"{', '.join(map(str, inputs))}: no text to train on")
    if recipe.model_type == "unigram" and recipe.normalization == "identity":
        write_atomically(model, with_exact_scores(model.read_bytes(), recipe.user_symbols))
    _check_symbols(model, symbols)
    if recipe.chat_template is None:
        return [model], sample
    template = write_atomically(folder / TEMPLATE_FILE, recipe.chat_template.encode())
    return [model, template], sample


def _convert(folder: Path, recipe: TokenizerRecipe, lines: Sequence[str]) -> list[Path]:
    """Writes the form for transformers and compares both on `lines` and on random text."""
    model = folder / MODEL_FILE
    made = save_hugging_face(model, folder, recipe.model_type, recipe.user_symbols)
    symbols = [*_control_symbols(recipe), *recipe.user_symbols]
    check_conversion(model, folder, [*lines, *random_texts(symbols, lines, _CHECKED_TEXTS)])
    return made


def _control_symbols(recipe: TokenizerRecipe) -> list[str]:
    return [_UNKNOWN, _PADDING, recipe.eos_symbol, *recipe.control_symbols]


def _check_symbols(model: Path, symbols: Sequence[str]) -> None:
    """Checks that each is one token where a chat template writes it."""
    tokenizer = load_tokenizer(model)
    for symbol in symbols:
        ids = tokenizer.encode_rendered(symbol).ids
        if ids != [tokenizer.symbol_id(symbol)]:
            raise DataError(f"{model}: symbol {symbol!r} is not one token: {ids}")


def _sampled(lines: Iterator[str], sample: list[str]) -> Iterator[str]:
    """Passes the lines on, and keeps the first of them in `sample`."""
    for line in lines:
        if len(sample) < _SAMPLED_LINES:
            sample.append(line)
        yield line
