"""One interface to both kinds of tokenizers: sentencepiece models and Hugging Face folders."""

from __future__ import annotations

import functools
import io
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_megatron.data.chat import (
    TEMPLATE_FILE,
    Encoded,
    Rendered,
    read_template,
    render,
    written_marks,
)
from gspo_megatron.data.quoting import Controls, Span, touches
from gspo_megatron.errors import DataError
from gspo_megatron.files import object_in, parse_json, write_atomically

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

HELP = (
    "give a sentencepiece .model file or a Hugging Face tokenizer folder "
    "(python -m gspo_megatron.data.toy makes a small one)"
)
HUGGING_FACE_FILES = ("tokenizer.json", "tokenizer_config.json")
GENERATION_FILE = "generation_config.json"
_NEEDS_TEMPLATE = "which messages and data.chat_template: true need"


def load_tokenizer(
    path: str | Path, template_options: Mapping[str, Any] | None = None
) -> Tokenizer:
    """Load a sentencepiece model (a file) or a Hugging Face tokenizer (a folder).

    `template_options` are variables of its chat template; `chat.check_template` checks them.

    Reads local files only, and runs no code that comes with a tokenizer.

    Raises DataError, with the path and what to do, if the tokenizer is missing or damaged or has no
    end-of-sequence token.
    """
    path = Path(path)
    if path.suffix == ".json" and not path.is_dir():
        raise DataError(f"{path}: for a Hugging Face tokenizer name its folder, {path.parent}")
    tokenizer = HuggingFaceTokenizer(path) if path.is_dir() else SentencePieceTokenizer(path)
    tokenizer.template_options = template_options or {}
    return tokenizer


class Tokenizer(ABC):
    """The interface to a tokenizer, whatever its kind."""

    name: str  # its path
    vocab_size: int  # the largest id + 1
    eos_id: int
    eos_ids: tuple[int, ...]  # each ends a response
    pad_id: int
    bos_id: int | None  # None if the tokenizer's models expect no BOS token before plain text
    bos_text: str
    unk_id: int | None  # None if no id is reserved for unknown characters
    # Plain text is never encoded as one of these tokens; a chat template's output may be.
    special_tokens: dict[str, int]
    chat_template: str | None  # Jinja, as transformers uses it
    template_options: Mapping[str, Any]  # variables of the template
    _symbols: Mapping[str, Any]  # variables of the template for special tokens, such as eos_token
    _no_template: str  # why there is no chat template, and what to do
    _adds_space = False  # whether it puts a space before every text

    @property
    def controls(self) -> Controls:
        """Tokens that a chat template may write. No other text may be encoded as such a token."""
        return self._controls_with(self.chat_template)

    def encode(self, text: str) -> list[int]:
        """Return token ids without special tokens: text that spells one is encoded as text."""
        return self._checked(text, self._ids(text))

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode several texts in one call of the library."""
        all_ids = self._ids(list(texts)) if texts else []  # transformers refuses an empty list
        return [self._checked(text, ids) for text, ids in zip(texts, all_ids, strict=True)]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        open_answer: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Rendered:
        """Render a conversation as text; with `open_answer`, also the beginning of the next answer.

        `tools` replaces the tools in `template_options`. Raises DataError if the tokenizer has no
        template or the template refuses the messages.
        """
        if self.chat_template is None:
            raise DataError(f"{self.name}: {self._no_template}")
        if self._adds_space:
            raise DataError(
                f"{self.name}: puts a space before every text, so it cannot encode what a chat "
                "template writes between symbols; use a Hugging Face tokenizer folder"
            )
        variables = {**self._symbols, **self.template_options}
        if tools:
            variables["tools"] = list(tools)
        return render(
            self.name, self.chat_template, messages, open_answer, variables, self.controls
        )

    @abstractmethod
    def encode_rendered(self, text: str, quoted: Sequence[Span] = ()) -> Encoded:
        """Encode a chat template's output. Control symbols become their ids, except those with a
        character inside the `quoted` spans, which are data."""

    @abstractmethod
    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text without special tokens."""

    def decode_response(self, token_ids: Sequence[int]) -> str:
        """Decode without the end-of-sequence token at the end."""
        ends = len(token_ids) > 0 and token_ids[-1] in self.eos_ids
        return self.decode(token_ids[:-1] if ends else token_ids)

    @abstractmethod
    def symbol_id(self, symbol: str) -> int | None:
        """Return the id of a piece or special token; None if the tokenizer lacks it."""

    def _checked(self, text: str, ids: list[int]) -> list[int]:
        """Return the ids of a text; encode it again if they contain a control token."""
        return self._as_text(text).ids if self.controls.among(ids) else ids

    @abstractmethod
    def _controls_with(self, template: str | None) -> Controls:
        """Return the control tokens if this is the chat template."""

    @abstractmethod
    def _ids(self, text: str | list[str]) -> Any:
        """Return the ids of one text or of several texts. They may contain control tokens, such as
        marks of the template that are no special tokens."""

    @abstractmethod
    def _as_text(self, text: str) -> Encoded:
        """Encode text without control tokens."""


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece `.model` file. Without a padding token, it pads with end-of-sequence."""

    def __init__(self, path: Path) -> None:
        import sentencepiece

        try:
            content = path.read_bytes()
        except FileNotFoundError:
            where = "" if path.is_absolute() else f"; the current folder is {Path.cwd()}"
            raise DataError(f"{path}: no such tokenizer; {HELP}{where}") from None
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
        if not content:  # sentencepiece would accept an empty file and fail later
            raise DataError(f"{path}: an empty file, not a tokenizer; {HELP}")
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        except RuntimeError as error:
            raise DataError(f"{path}: not a sentencepiece model, or damaged; {HELP}") from error
        self.name = str(path)
        self.vocab_size = self._processor.get_piece_size()
        self.eos_id = self._processor.eos_id()
        if self.eos_id < 0:
            raise DataError(f"{path}: has no end-of-sequence token; train it with an eos_id")
        self.eos_ids = _eos_ids(path.parent, self.eos_id)
        pad_id: int = self._processor.pad_id()
        self.pad_id = pad_id if pad_id >= 0 else self.eos_id
        bos_id: int = self._processor.bos_id()
        self.bos_id = bos_id if bos_id >= 0 else None
        self.bos_text = self._processor.id_to_piece(bos_id) if bos_id >= 0 else ""
        self.unk_id = self._processor.unk_id()
        self.special_tokens = {
            self._processor.id_to_piece(token_id): token_id
            for token_id in range(self.vocab_size)
            if self._processor.is_control(token_id) or self._processor.is_unknown(token_id)
        }
        self.chat_template = read_template(path.parent)
        self._symbols = special_pieces(self._processor)
        self._no_template = (
            f"a sentencepiece model has no chat template, and there is no {TEMPLATE_FILE} beside "
            f"it, {_NEEDS_TEMPLATE}; add that file or use a Hugging Face tokenizer folder"
        )
        self._adds_space = self._processor.normalize("a") != "a"

    @functools.lru_cache(maxsize=4)  # noqa: B019 (a run has few tokenizers)
    def _controls_with(self, template: str | None) -> Controls:
        ids = {mark: self.symbol_id(mark) for mark in written_marks(template)}
        marks = {mark: number for mark, number in ids.items() if number is not None}
        return Controls({**self.special_tokens, **marks}, unknown=self.unk_id)

    def _ids(self, text: str | list[str]) -> Any:
        return self._processor.encode(text, num_threads=1)

    def _as_text(self, text: str) -> Encoded:
        mapping = self._processor.encode(text, return_type="offset_mapping")
        starts, ends = zip(*mapping["offsets"]) if mapping["ids"] else ((), ())
        encoded = Encoded(list(mapping["ids"]), list(starts), list(ends))
        return _spelled(encoded, text, self.controls, self._letter)

    def _letter(self, letter: str) -> list[int]:
        piece = self._processor.piece_to_id(letter)
        return [piece] if piece != self.unk_id else list(self._processor.encode(letter))

    def decode(self, token_ids: Sequence[int]) -> str:
        # A model may have more ids than its tokenizer and generate one of them.
        known = [int(token_id) for token_id in token_ids if token_id < self.vocab_size]
        return self._processor.decode(known)

    def encode_rendered(self, text: str, quoted: Sequence[Span] = ()) -> Encoded:
        return _encode_pieces(text, quoted, self.controls, lambda part, _: self._as_text(part))

    def symbol_id(self, symbol: str) -> int | None:
        token_id: int = self._processor.piece_to_id(symbol)  # <unk> if it lacks the symbol
        return token_id if self._processor.id_to_piece(token_id) == symbol else None


def special_pieces(processor: SentencePieceProcessor) -> dict[str, str]:
    """Return the special pieces of a sentencepiece model, by their names in transformers."""
    ids = {
        "unk_token": processor.unk_id(),
        "bos_token": processor.bos_id(),
        "eos_token": processor.eos_id(),
        "pad_token": processor.pad_id(),
    }
    return {name: processor.id_to_piece(n) for name, n in ids.items() if n >= 0}


class HuggingFaceTokenizer(Tokenizer):
    """A folder written by `save_pretrained`."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = _load_hugging_face(path)
        # `split_special_tokens` is a state of the library's tokenizer, not of a single call. The
        # lock keeps calls in other threads from changing it during this call.
        self._switch = threading.Lock()
        self.name = str(path)
        # Not len(): a vocabulary may have gaps, and the model's embedding must hold the last id.
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        if not self.vocab_size:
            raise DataError(f"{path}: the tokenizer has an empty vocabulary")
        if self._tokenizer.eos_token_id is None:
            raise DataError(
                f"{path}: has no end-of-sequence token; set eos_token in tokenizer_config.json"
            )
        self.eos_id = self._tokenizer.eos_token_id
        self.eos_ids = _eos_ids(path, self.eos_id)
        added = self._tokenizer.added_tokens_decoder.items()
        self.special_tokens = {token.content: number for number, token in added if token.special}
        self._added = {token.content: (number, token) for number, token in added}
        pad_id = self._tokenizer.pad_token_id
        self.pad_id = self.eos_id if pad_id is None else pad_id
        # Many folders name a BOS token that their models do not expect before a text (GPT-2), so
        # check whether the tokenizer adds it.
        bos_id = self._tokenizer.bos_token_id
        first = self._tokenizer("", verbose=False)["input_ids"][:1]
        self.bos_id = bos_id if bos_id is not None and first == [bos_id] else None
        self.bos_text = "" if self.bos_id is None else self._tokenizer.bos_token
        # GPT-2 uses its end-of-text token as the unknown token, although it knows all characters.
        unk_id = self._tokenizer.unk_token_id
        self.unk_id = None if unk_id in (self.eos_id, bos_id) else unk_id
        template = self._tokenizer.chat_template
        if isinstance(template, dict):  # the tokenizer has several templates, by name
            template = template.get("default")
        self.chat_template = template or None
        self._symbols = self._tokenizer.special_tokens_map
        self._no_template = (
            f"the tokenizer has no chat template, {_NEEDS_TEMPLATE}; use the folder of a chat model"
        )

    @functools.lru_cache(maxsize=4)  # noqa: B019 (a run has few tokenizers)
    def _controls_with(self, template: str | None) -> Controls:
        named = written_marks(template)
        marks = {
            text: number
            for text, (number, token) in self._added.items()
            if token.special or text in named
        }
        return Controls(
            marks,
            frozenset(text for text in marks if self._added[text][1].lstrip),
            frozenset(text for text in marks if self._added[text][1].rstrip),
            self._tokenizer.unk_token_id,
        )

    def _ids(self, text: str | list[str]) -> Any:
        # Special tokens can appear only if they are also pieces of the tokenizer's model.
        with self._switch:
            return self._tokenizer(
                text, add_special_tokens=False, split_special_tokens=True, verbose=False
            )["input_ids"]

    def _encoded(self, text: str, as_text: bool) -> Encoded:
        with self._switch:
            encoding = self._tokenizer(
                text,
                add_special_tokens=False,
                split_special_tokens=as_text,
                return_offsets_mapping=True,
                verbose=False,
            )
        starts, ends = zip(*encoding["offset_mapping"]) if encoding["input_ids"] else ((), ())
        return Encoded(encoding["input_ids"], list(starts), list(ends))

    def _as_text(self, text: str, is_first: bool = True) -> Encoded:
        # Some tokenizers put a space only before the first text. For other texts, a line feed
        # before the text prevents this; the tokens of the line feed are then removed.
        before = "" if is_first or not self._is_first_marked else "\n"
        encoded, gone = self._encoded(before + text, as_text=True), len(before)
        extra = self._ids(before) if before else []
        if encoded.ids[: len(extra)] != extra:
            encoded, gone, extra = self._encoded(text, as_text=True), 0, []
        columns = (encoded.ids, encoded.starts, encoded.ends)
        ids, starts, ends = (column[len(extra) :] for column in columns)
        encoded = Encoded(ids, [n - gone for n in starts], [n - gone for n in ends])
        return _spelled(encoded, text, self.controls, self._letter)

    def _letter(self, letter: str) -> list[int]:
        piece = self._tokenizer.get_vocab().get(letter)
        return self._ids(letter) if piece is None else [piece]

    @functools.cached_property
    def _is_first_marked(self) -> bool:
        """Whether the same text has different tokens at the beginning and after a special token."""
        end = self._tokenizer.convert_ids_to_tokens(self.eos_id)
        return self._encoded(f"{end}a", as_text=False).ids != [self.eos_id, *self._ids("a")]

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(
            [int(token_id) for token_id in token_ids],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,  # True would change the model's text
        )

    def encode_rendered(self, text: str, quoted: Sequence[Span] = ()) -> Encoded:
        encoded, controls = self._encoded(text, as_text=False), self.controls
        if not _has_quoted(encoded, text, quoted, controls):
            return encoded
        return _encode_pieces(text, quoted, controls, self._as_text)

    def symbol_id(self, symbol: str) -> int | None:
        return self._tokenizer.get_vocab().get(symbol)


def _has_quoted(encoded: Encoded, text: str, quoted: Sequence[Span], controls: Controls) -> bool:
    """Whether a control token of `encoded` contains a character from the `quoted` data."""
    if not quoted:
        return False
    names, columns = controls.names, zip(encoded.ids, encoded.starts, encoded.ends, strict=True)
    # Check names first, which is fast: most tokens are no control tokens.
    places = (controls.place(n, text, (a, b)) for n, a, b in columns if n in names)
    return any(place is not None and touches(place, quoted) for place in places)


def _spelled(
    encoded: Encoded, text: str, controls: Controls, letter: Callable[[str], list[int]]
) -> Encoded:
    """Replace each control token of `encoded` by the tokens of its single letters.

    `letter` returns the ids of one letter."""
    result = Encoded([], [], [])
    for number, start, end in zip(encoded.ids, encoded.starts, encoded.ends, strict=True):
        if controls.place(number, text, (start, end)) is None:
            parts = [(number, start, end)]
        else:
            parts = [(n, at, at + 1) for at in range(start, end) for n in letter(text[at])]
        for n, first, last in parts:
            result.ids.append(n)
            result.starts.append(first)
            result.ends.append(last)
    return result


def _encode_pieces(
    text: str,
    quoted: Sequence[Span],
    controls: Controls,
    as_text: Callable[[str, bool], Encoded],
) -> Encoded:
    """Encode a chat template's output; the `quoted` spans are data, not template text.

    `as_text(part, is_first)` encodes a part that contains no control tokens."""
    result = Encoded([], [], [])
    for (start, end), number in controls.pieces(text, quoted):
        if number is None:
            part = as_text(text[start:end], start == 0)
        else:
            part = Encoded([number], [0], [end - start])
        result.ids.extend(part.ids)
        result.starts.extend(start + each for each in part.starts)
        result.ends.extend(start + each for each in part.ends)
    return result


def files_beside(tokenizer: str | Path) -> list[Path]:
    """Return the files that decide how a tokenizer is used and are not part of it: the ends of
    responses, and the chat template of a sentencepiece model."""
    path = Path(tokenizer)
    if path.is_dir():
        return [file for file in [path / GENERATION_FILE] if file.is_file()]
    has_template = (path.parent / TEMPLATE_FILE).is_file()
    names = (TEMPLATE_FILE if has_template else "tokenizer_config.json", GENERATION_FILE)
    return [file for name in names if (file := path.parent / name).is_file()]


def _eos_ids(folder: Path, eos_id: int) -> tuple[int, ...]:
    """Return `eos_id` and the ids of eos_token_id in the folder's generation_config.json."""
    file = folder / GENERATION_FILE
    if not file.is_file():
        return (eos_id,)
    try:
        named = parse_json(file.read_bytes()).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{file}: cannot be read: {error}") from error
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if not all(type(each) is int for each in ids):
        raise DataError(f"{file}: eos_token_id = {named!r}; allowed: an id or a list of ids")
    return tuple(dict.fromkeys([eos_id, *ids]))


def _load_hugging_face(path: Path) -> Any:
    if not any((path / name).is_file() for name in HUGGING_FACE_FILES):
        inside = path / "tokenizer.model"
        advice = f"name the file {inside}" if inside.is_file() else HELP
        files = " or ".join(HUGGING_FACE_FILES)
        raise DataError(f"{path}: a folder without {files}; {advice}")
    import transformers
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # the warnings are about models and libraries not used here
    try:
        plain = _names_no_family(path)
        loader = transformers.PreTrainedTokenizerFast if plain else transformers.AutoTokenizer
        return loader.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the libraries raise many kinds of errors
        reason = " ".join(str(error).split())
        if not (path / "tokenizer.json").is_file() and _is_code(path):
            raise DataError(
                f"{path}: its tokenizer is Python code, which is never run; make a folder with a "
                "tokenizer.json (docs/checkpoints.md), and name that folder"
            ) from error
        raise DataError(
            f"{path}: not a tokenizer that transformers can load, or damaged: {reason}; {HELP}"
        ) from error
    finally:
        logging.set_verbosity(verbosity)


def _is_code(folder: Path) -> bool:
    """Whether tokenizer_config.json names Python code as the tokenizer."""
    named = object_in(folder / "tokenizer_config.json")
    return "AutoTokenizer" in (named.get("auto_map") or ())


def _names_no_family(path: Path) -> bool:
    """Whether AutoTokenizer would choose the plain class for this folder.

    If so, AutoTokenizer is not needed. Its import is slow, because it imports torch."""
    if (path / "config.json").exists():  # AutoTokenizer would also use its model_type
        return False
    named = object_in(path / "tokenizer_config.json")
    return named.get("tokenizer_class") == "PreTrainedTokenizerFast"


def train_sentencepiece(
    lines: Iterable[str],
    vocab_size: int,
    out_prefix: str | Path,
    model_type: str = "unigram",
    **options: Any,
) -> Path:
    """Train a sentencepiece model of at most `vocab_size` pieces; return `out_prefix`.model.

    The model does not normalise text and adds or removes no spaces. So decoding restores the
    encoded text if its characters occur in `lines`. Ids: 0 unknown, 1 padding, 2 end of sequence;
    there is no beginning-of-sequence token. `options` are further settings of sentencepiece's
    trainer.

    Raises DataError if sentencepiece cannot train on these lines.
    """
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            **{**_TRAINING_DEFAULTS, **options},
        )
    except (RuntimeError, OSError) as error:
        raise DataError(f"{out_prefix}.model: sentencepiece could not train: {error}") from error
    return write_atomically(f"{out_prefix}.model", model.getvalue())


_TRAINING_DEFAULTS: dict[str, Any] = {
    "hard_vocab_limit": False,
    "character_coverage": 1.0,
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "unk_id": 0,
    "pad_id": 1,
    "eos_id": 2,
    "bos_id": -1,
    "minloglevel": 2,  # the library prints errors only
}
