"""A tokenizer of characters in both of its forms, and how both forms of a BPE tokenizer are
read."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import transformers

from gspo_megatron.data.chat import CHATML
from gspo_megatron.data.tokenizers import load_tokenizer, train_sentencepiece
from gspo_megatron.errors import DataError
from tests.unit.data.corpora import both, make_texts, make_tokenizer

SYMBOLS = ["<unk>", "<pad>", "<|im_end|>", "<|im_start|>", "<|doc|>", "<sep>", "\n\n", "||"]
PLANES = ((0, 0xD7FF), (0xE000, 0x10FFFF))


def random_texts(symbols: Sequence[str], sample: Sequence[str], count: int) -> Iterator[str]:
    """Random texts. Their parts are words of `sample`, symbols, spaces and all kinds of characters.
    The seed is fixed."""
    source = random.Random(count)
    words = [word for line in sample[:100] for word in line.split()[:20]]
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


def assert_same_ids(folder: Path, texts: Sequence[str]) -> None:
    hugging_face, model = both(folder)
    for text in texts:
        assert hugging_face.encode_rendered(text).ids == model.encode_rendered(text).ids, text


@pytest.fixture(scope="module", params=["bpe", "char"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / request.param, request.param)


def test_transformers_gives_the_same_ids_and_text(folder: Path) -> None:
    ours = load_tokenizer(folder / "tokenizer.model")
    theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    source = random.Random(11)
    # The parts are whole symbols, beginnings of symbols, repeated characters, and arbitrary
    # characters.
    parts = [symbol[:n] for symbol in SYMBOLS for n in range(7)] + [*"|<>aklo▁", "▁" * 5, "-" * 9]
    parts += [chr(source.randint(*source.choice(PLANES))) for _ in range(300)]
    for text in random_texts([*SYMBOLS * 9, *parts], make_texts(9, seed=1, words=200), 1500):
        # The first encoding is that of a rendered chat template, in which control symbols count.
        ids = ours.encode_rendered(text).ids
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids, text
        assert theirs(text)["input_ids"] == ids  # transformers adds no special tokens
        # The second encoding is that of plain text, in which control symbols are ordinary
        # characters.
        plain = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert plain == ours.encode(text), text
        assert theirs.decode(plain) == ours.decode(plain) == text.replace("▁", " "), text
    assert (theirs.eos_token_id, theirs.pad_token_id) == (ours.eos_id, ours.pad_id)
    assert theirs.bos_token_id is None and ours.bos_id is None
    assert len(theirs) == ours.vocab_size


def test_both_forms_are_the_same_tokenizer(folder: Path) -> None:
    hugging_face, model = both(folder)
    for name in ("vocab_size", "eos_id", "pad_id", "bos_id", "chat_template"):
        assert getattr(model, name) == getattr(hugging_face, name), name
    messages = [
        {"role": "user", "content": "kalo <sep> 日本"},
        {"role": "assistant", "content": "é"},
    ]
    assert model.render(messages) == hugging_face.render(messages)
    assert model.render(messages[:1], True) == hugging_face.render(messages[:1], True)
    assert [model.symbol_id(s) for s in SYMBOLS] == [hugging_face.symbol_id(s) for s in SYMBOLS]
    assert model.symbol_id("no such piece") is hugging_face.symbol_id("no such piece") is None
    texts = [*make_texts(20, seed=6), "", "<sep><|doc|>", "🙂"]
    for tokenizer in (model, hugging_face):
        assert tokenizer.encode_all(texts) == [tokenizer.encode(text) for text in texts]
        assert tokenizer.encode_all([]) == []


def test_symbols_are_one_token_each(folder: Path) -> None:
    tokenizer = load_tokenizer(folder / "tokenizer.model")
    for symbol in SYMBOLS:
        assert tokenizer.encode_rendered(symbol).ids == [tokenizer.symbol_id(symbol)]


def test_offsets_cover_the_text(folder: Path) -> None:
    for tokenizer in both(folder):
        text = "kalo<|im_start|> <sep>🙂 日\n\nund"
        encoded = tokenizer.encode_rendered(text)
        assert len(encoded.ids) == len(encoded.starts) == len(encoded.ends)
        covered = {n for start, end in zip(encoded.starts, encoded.ends) for n in range(start, end)}
        assert covered == set(range(len(text)))
        assert encoded.starts == sorted(encoded.starts)


def test_without_byte_fallback_unknown_characters_are_unknown(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path / "t", byte_fallback=False)
    ours = load_tokenizer(folder / "tokenizer.model")
    assert ours.symbol_id("<unk>") in ours.encode("🙂")
    assert_same_ids(folder, ["🙂🙂 a🙂", "<0x41>", "kalo"])


def test_it_gives_the_same_files_every_time(tmp_path: Path, folder: Path) -> None:
    again = make_tokenizer(tmp_path / folder.name, folder.name)
    for file in folder.iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes(), file.name
    assert sorted(f.name for f in again.iterdir()) == [
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
    ]


def test_digits_may_be_symbols(tmp_path: Path) -> None:
    symbols = (*"0123456789", "<", "\n")
    folder = make_tokenizer(tmp_path / "t", "char", user_symbols=symbols)
    source = random.Random(4)
    texts = [f"ka{source.randint(0, 10**9)} <0x{source.randint(0, 255):02X}>\n" for _ in range(50)]
    tokenizer = load_tokenizer(folder / "tokenizer.model")
    assert_same_ids(folder, texts)
    assert tokenizer.encode("4711") == [tokenizer.symbol_id(digit) for digit in "4711"]


def test_a_model_that_adds_spaces_has_no_chat(tmp_path: Path) -> None:
    path = train_sentencepiece(["ka lo"], 40, tmp_path / "t", "bpe", add_dummy_prefix=True)
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    with pytest.raises(DataError, match="puts a space before every text"):
        load_tokenizer(path).render([{"role": "user", "content": "ka"}])
