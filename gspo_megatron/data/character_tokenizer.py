"""A tokenizer of single characters, for small models and examples, in the forms of sentencepiece
and of transformers. A real model brings its tokenizer; sentencepiece's own trainer makes others."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_megatron.data.chat import CHATML, TEMPLATE_FILE
from gspo_megatron.data.tokenizers import special_pieces, train_sentencepiece
from gspo_megatron.files import write_atomically

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPACE = "▁"  # how pieces spell a space
# Text such as "<0x41>" must become characters, never the piece for that byte: so these characters
# must all be in the vocabulary.
_BYTE_PIECE_CHARACTERS = "<0x123456789ABCDEF>"
# Keywords of `write_character_tokenizer` for ChatML, whose second symbol ends a sequence.
CHATML_SYMBOLS: dict[str, Any] = {
    "control_symbols": ("<|im_start|>",),
    "eos_symbol": "<|im_end|>",
    "chat_template": CHATML,
}


def write_character_tokenizer(
    folder: str | Path,
    texts: Iterable[str],
    vocab_size: int,
    *,
    byte_fallback: bool = True,
    user_symbols: Sequence[str] = (),
    control_symbols: Sequence[str] = (),
    eos_symbol: str = "</s>",
    chat_template: str | None = None,
) -> Path:
    """Writes tokenizer.model, tokenizer.json, tokenizer_config.json and, with a template (Jinja),
    chat_template.jinja; returns the path of the first.

    The vocabulary has the characters of `texts`, and at most `vocab_size` ids. With byte_fallback
    other characters are spelled in bytes. A user symbol is one token in any text, a control symbol
    only where a chat template writes it. Raises DataError if sentencepiece cannot train on this.
    """
    folder = Path(folder)
    symbols = ("<unk>", "<pad>", eos_symbol, *control_symbols, *user_symbols)
    required = "\n" + "".join(symbols) + _BYTE_PIECE_CHARACTERS * byte_fallback
    model = train_sentencepiece(
        (line for text in texts for line in text.split("\n") if line),
        vocab_size,
        folder / "tokenizer",
        "char",
        byte_fallback=byte_fallback,
        unk_piece="<unk>",
        pad_piece="<pad>",
        eos_piece=eos_symbol,
        control_symbols=list(control_symbols),
        user_defined_symbols=list(user_symbols),
        # A user symbol of one character is a piece already.
        required_chars="".join(sorted({*required} - {*user_symbols})),
        input_sentence_size=0,  # all lines count, in their order
        shuffle_input_sentence=False,
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **special_pieces(_processor(model)),
    }
    files = {
        "tokenizer.json": for_transformers(model, user_symbols).to_str(pretty=True),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
    }
    if chat_template is not None:
        files[TEMPLATE_FILE] = chat_template
    for name, content in files.items():
        write_atomically(folder / name, content.encode())
    return model


def for_transformers(model: Path, user_symbols: Sequence[str] = ()) -> Tokenizer:
    """The same tokenizer in the `tokenizers` library: a BPE model, which without merges leaves
    single characters. (The conversion of transformers needs protobuf, and text can spell byte and
    control pieces there.)"""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    processor = _processor(model)
    pieces = [processor.id_to_piece(n) for n in range(processor.get_piece_size())]
    special = [n for n in range(len(pieces)) if processor.is_control(n) or processor.is_unknown(n)]
    tokenizer = Tokenizer(
        models.BPE(
            {piece: n for n, piece in enumerate(pieces)},
            [],
            unk_token=pieces[processor.unk_id()],
            fuse_unk=True,
            byte_fallback=any(map(processor.is_byte, range(len(pieces)))),
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(
        [AddedToken(pieces[n], special=True, normalized=False) for n in special]
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in user_symbols])
    return tokenizer


def _processor(model: Path) -> Any:
    from sentencepiece import SentencePieceProcessor

    return SentencePieceProcessor(model_proto=model.read_bytes())
