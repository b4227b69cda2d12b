from __future__ import annotations

import random
from pathlib import Path

import pytest
import sentencepiece
import transformers

from gspo_megatron.data import tokenizer_training
from gspo_megatron.data.chat import CHATML
from gspo_megatron.data.tokenizer_training import (
    STEP,
    SYMBOL_SCORE,
    TokenizerRecipe,
    check_conversion,
    convert,
    random_texts,
    train_tokenizer,
    with_exact_scores,
)
from gspo_megatron.data.tokenizers import load_tokenizer, train_sentencepiece
from gspo_megatron.errors import DataError
from tests.unit.data.corpora import both, make_texts, make_tokenizer, refusal, write_jsonl

SYMBOLS = ["<unk>", "<pad>", "<|im_end|>", "<|im_start|>", "<|doc|>", "<sep>", "\n\n", "||"]
PLANES = ((0, 0xD7FF), (0xE000, 0x10FFFF))


@pytest.fixture(scope="module", params=["unigram", "bpe", "char"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / request.param, request.param)


def test_transformers_gives_the_same_ids_and_text(folder: Path) -> None:
    ours = load_tokenizer(folder / "tokenizer.model")
    theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    source = random.Random(11)
    # beside whole symbols, their parts, runs of one character, any character
    parts = [symbol[:n] for symbol in SYMBOLS for n in range(7)] + [*"|<>aklo▁", "▁" * 5, "-" * 9]
    parts += [chr(source.randint(*source.choice(PLANES))) for _ in range(300)]
    for text in random_texts([*SYMBOLS * 9, *parts], make_texts(9, seed=1, words=200), 1500):
        # As a chat template's text, in which control symbols count …
        ids = ours.encode_rendered(text).ids
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids, text
        assert theirs(text)["input_ids"] == ids  # nothing is added
        # … and as plain text, in which they are characters like any other.
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
    assert tokenizer.encode("<sep>") == [tokenizer.symbol_id("<sep>")]
    # Nobody ends a sequence, or opens a turn, by writing its symbol.
    for symbol in ("<|im_end|>", "<|im_start|>", "<|doc|>", "<pad>"):
        assert tokenizer.symbol_id(symbol) not in tokenizer.encode(f"a{symbol}b")


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
    check_conversion(folder / "tokenizer.model", folder, ["🙂🙂 a🙂", "<0x41>", "kalo"])


def test_a_recipe_gives_the_same_files_every_time(tmp_path: Path, folder: Path) -> None:
    again = make_tokenizer(tmp_path / folder.name, folder.name)
    for file in folder.iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes(), file.name
    assert sorted(f.name for f in again.iterdir()) == [
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
    ]


def test_normalisation_leaves_the_sentencepiece_model_alone(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path / "t", normalization="nfkc")
    assert sorted(f.name for f in folder.iterdir()) == ["chat_template.jinja", "tokenizer.model"]
    tokenizer = load_tokenizer(folder / "tokenizer.model")
    assert tokenizer.encode("ｋａ") == tokenizer.encode("ka")


def test_all_faults_of_a_recipe_come_at_once(tmp_path: Path) -> None:
    recipe = TokenizerRecipe(
        vocab_size=1,
        model_type="wordpiece",
        control_symbols=["<a>", "x", "<pad>"],
        user_symbols=["<a>", "two words", ""],
        chat_template="{{ '<|user|>' }}{{ messages[0].content }}",
        normalization="lower",
        character_coverage=0.5,
        max_sentences=-1,
    )
    lines = refusal(train_tokenizer, [tmp_path / "none.jsonl"], tmp_path / "t", recipe)
    assert [line.split(":")[0] for line in lines] == [
        "vocab_size = 1",
        "max_sentences = -1",
        "model_type = 'wordpiece'",
        "normalization = 'lower'",
        "character_coverage = 0.5",
        "symbol '<pad>'",
        "symbol '<a>'",
        "symbol 'x'",
        "symbol 'two words'",
        "symbol ''",
        "chat_template",
    ]
    assert "writes <|user|>, which is not one of the symbols" in lines[-1]
    for number in ("vocab_size", "max_sentences"):  # beyond sentencepiece's
        recipe = TokenizerRecipe(**{"vocab_size": 40, number: 2**31})
        (line,) = refusal(train_tokenizer, [tmp_path / "none.jsonl"], tmp_path / "t", recipe)
        assert line.startswith(f"{number} = 2147483648: ") and line.endswith(" in 32 bits")
    assert list(tmp_path.iterdir()) == []


def test_a_template_that_is_no_jinja_is_refused_before_training(tmp_path: Path) -> None:
    def refused(template: str) -> str:
        recipe = TokenizerRecipe(400, chat_template=template)
        (line,) = refusal(train_tokenizer, [tmp_path / "none"], tmp_path / "t", recipe)
        assert list(tmp_path.iterdir()) == []
        return line

    fault = refused("{% for message in messages %}\n{{ message.content }}\n{% endfro %}")
    assert fault.startswith("chat_template: not valid Jinja: line 3: ") and "'endfro'" in fault
    for strict in ("{{ raise_exception('a system message is wanted') }}", "{{ messages[0].role }}"):
        assert refused(strict).endswith("none: no such file")


def test_bad_input_leaves_nothing_behind(tmp_path: Path) -> None:
    corpus = write_jsonl(tmp_path / "c.jsonl", ["kalo"] * 3)
    corpus.write_text(corpus.read_text() + '{"txt": "a"}\n')
    expected = f"{corpus}:4: no field 'text'; the fields are: 'txt' (--text-field chooses one)"
    assert refusal(train_tokenizer, [corpus], tmp_path / "t", TokenizerRecipe(300)) == [expected]
    write_jsonl(corpus, ["ka"])  # too little text
    (line,) = refusal(train_tokenizer, [corpus], tmp_path / "t", TokenizerRecipe(8, "bpe"))
    assert line.startswith(f"{tmp_path}/t/tokenizer.model: sentencepiece could not")
    assert list(tmp_path.iterdir()) == [corpus]


def test_a_tokenizer_is_not_overwritten_by_accident(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path / "t")
    corpus = write_jsonl(tmp_path / "c.jsonl", make_texts(100, seed=1))
    with pytest.raises(DataError, match="exists already; --overwrite replaces it"):
        train_tokenizer([corpus], folder, TokenizerRecipe(400))
    before = (folder / "tokenizer.model").read_bytes()
    train_tokenizer([corpus], folder, TokenizerRecipe(400), overwrite=True)
    assert (folder / "tokenizer.model").read_bytes() != before


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_digits_may_be_symbols(tmp_path: Path, model_type: str) -> None:
    symbols = (*"0123456789", "<", "\n")
    folder = make_tokenizer(tmp_path / "t", model_type, user_symbols=symbols)
    source = random.Random(4)
    texts = [f"ka{source.randint(0, 10**9)} <0x{source.randint(0, 255):02X}>\n" for _ in range(50)]
    check_conversion(folder / "tokenizer.model", folder, texts)
    tokenizer = load_tokenizer(folder / "tokenizer.model")
    assert tokenizer.encode("4711") == [tokenizer.symbol_id(digit) for digit in "4711"]


def test_a_model_whose_other_form_differs_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tokenizer_training.save_hugging_face

    def wrong(*arguments: object) -> list[Path]:
        paths = real(*arguments)  # type: ignore[arg-type]
        text = paths[0].read_text()
        assert '"▁"' in text
        paths[0].write_text(text.replace('"content": "▁"', '"content": "_"'))
        return paths

    monkeypatch.setattr(tokenizer_training, "save_hugging_face", wrong)
    (message,) = refusal(make_tokenizer, tmp_path / "t")
    assert message.startswith(
        f"{tmp_path}/t: the form for transformers gives other ids than {tmp_path}/t/"
    )
    assert message.endswith("; only the sentencepiece model was written")
    left = sorted(path.name for path in (tmp_path / "t").iterdir())
    assert left == ["chat_template.jinja", "tokenizer.model"]
    assert load_tokenizer(tmp_path / "t" / "tokenizer.model").encode("kalo")


def test_a_model_that_adds_spaces_has_no_chat(tmp_path: Path) -> None:
    path = train_sentencepiece(["ka lo"], 40, tmp_path / "t", "bpe", add_dummy_prefix=True)
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    with pytest.raises(DataError, match="puts a space before every text"):
        load_tokenizer(path).render([{"role": "user", "content": "ka"}])


@pytest.mark.parametrize("folder", [".", ".."])
def test_the_present_folder_may_hold_the_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    here = tmp_path / "a" / "b"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    corpus = write_jsonl(tmp_path / "c.jsonl", ["ka lo mi"] * 9)
    recipe = TokenizerRecipe(40, "char", byte_fallback=False, normalization="nfkc")
    (model,) = train_tokenizer([corpus], folder, recipe)
    assert model == (here / folder).resolve() / "tokenizer.model"
    assert sorted(path.name for path in model.parent.iterdir()) == sorted(
        ["tokenizer.model", *(["b"] if folder == ".." else [])]
    )


# --- exact scores of unigram models ---------------------------------------------------------------

PAIR = ("<sep>", "==")


def train_runs(folder: Path) -> bytes:
    """A unigram model that knows runs of several lengths, with and without neighbours."""
    source = random.Random(2)
    lines = [line for text in make_texts(300, seed=2) for line in text.split("\n")]
    lines += ["-" * source.randint(1, 12) + source.choice(lines) for _ in range(600)]
    path = train_sentencepiece(
        *(lines, 400, folder / "model"),
        user_defined_symbols=list(PAIR),
        required_chars="<sep>=",
        byte_fallback=True,
    )
    return path.read_bytes()


def processor(model: bytes) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=model)


def runs(count: int) -> list[str]:
    source = random.Random(3)
    kinds = (lambda: "-" * source.randint(1, 15), lambda: "=" * source.randint(1, 9))
    words = " ".join(make_texts(3, seed=4)).split()
    others = (lambda: source.choice(words), lambda: " ", lambda: "<sep>")
    return [
        "".join(source.choice(kinds + others)() for _ in range(source.choice((5, 50, 500))))
        for _ in range(count)
    ]


def disagreements(model: bytes) -> int:
    ours, theirs = processor(model), convert(processor(model), "unigram", PAIR)
    return sum(ours.encode(text) != theirs.encode(text).ids for text in runs(200))


def test_runs_of_a_character_are_cut_alike_in_both_libraries(tmp_path: Path) -> None:
    model = train_runs(tmp_path)
    assert disagreements(model) > 10  # of 200: rounding decides
    assert disagreements(with_exact_scores(model, PAIR)) == 0


def test_only_scores_and_user_symbols_change(tmp_path: Path) -> None:
    model = train_runs(tmp_path)
    before, after = processor(model), processor(with_exact_scores(model, PAIR))
    assert after.get_piece_size() == before.get_piece_size()
    for n in range(before.get_piece_size()):
        assert after.id_to_piece(n) == before.id_to_piece(n)
        for kind in ("is_control", "is_unknown", "is_byte", "is_unused"):
            assert getattr(after, kind)(n) == getattr(before, kind)(n)
        score = after.get_score(n)
        assert (score * STEP).is_integer()
        if before.id_to_piece(n) in PAIR:
            assert score == SYMBOL_SCORE
        else:
            assert score == pytest.approx(before.get_score(n), abs=0.5 / STEP)
    # Ordinary text is cut as before, but for close calls.
    texts = make_texts(200, seed=9)
    same = sum(before.encode(text) == after.encode(text) for text in texts)
    assert same > 150
    assert all(after.decode(after.encode(text)) == text for text in texts)


def test_symbols_win_over_pieces_that_hold_their_beginning(tmp_path: Path) -> None:
    lines = ["rare ab<", "ab< ab<", "sep> sep> sep>"] * 50
    path = train_sentencepiece(lines, 40, tmp_path / "m", user_defined_symbols=["<sep>"])
    model = path.read_bytes()
    symbol = processor(model).piece_to_id("<sep>")
    assert symbol in processor(with_exact_scores(model, ["<sep>"])).encode("ab<sep>")
