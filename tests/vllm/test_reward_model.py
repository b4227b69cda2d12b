"""A reward model behind a URL. `gspo-megatron serve` starts vLLM for a folder with a
...ForSequenceClassification model. The scores must be those that transformers computes."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from gspo_megatron.config.schema import RewardSection
from gspo_megatron.data.character_tokenizer import write_character_tokenizer
from gspo_megatron.errors import RewardError
from gspo_megatron.rollout.reward_model import KEY_VARIABLE, ModelServer, ModelTexts
from gspo_megatron.types import Sample
from tests.e2e.resuming import all_records, train
from tests.unit.hf.preference_folder import scores_by_transformers, write_score_model
from tests.vllm.servers import served_by_command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# Both sides compute in fp32 with different kernels. Scores are about 1, and we have seen a
# difference of 3e-7.
SAME = 1e-5
SIZES = {
    "hidden_size": 64,  # vLLM's kernels need a multiple of 32, and a head_dim of 32, 64, 80, ...
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}
TEMPLATE = (
    "{%- for message in messages -%}{{- message['role'] ~ ': ' ~ message['content'] ~ eos_token -}}"
    "{%- endfor -%}"
)


class Scorer(NamedTuple):
    folder: Path
    url: str
    key: str


@pytest.fixture(scope="module")
def scorer(
    vllm_python: Path, toy: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scorer]:
    """A Qwen3-MoE model with a score head, with its tokenizer, its chat template, and a server for
    it."""
    folder = write_score_model(
        tmp_path_factory.mktemp("scorer") / "model", "qwen3_moe", seed=3, **SIZES
    )
    texts = [*(toy / "train.jsonl").read_text().splitlines(), "user: assistant: "]
    write_character_tokenizer(folder, texts, 128, byte_fallback=False)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    words = (str(folder), "--python", str(vllm_python), "max_num_seqs=32")
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv(KEY_VARIABLE, raising=False)
        place = tmp_path_factory.mktemp("server")
        with served_by_command(place, *words, said="KEY=") as (server, told):
            url = re.search(
                r"ready: reward\.model\.url=(http://127\.0\.0\.1:\d+)$", told, re.MULTILINE
            )
            key = re.search(rf"{KEY_VARIABLE}=(\S{{32,}})", told)
            assert url and key
            yield Scorer(folder, url[1], key[1])
            server.terminate()
            assert server.wait(60) == 0


def samples_of(run: Path, toy: Path) -> list[tuple[Sample, float]]:
    """The samples in samples.jsonl, with their rewards."""
    found = map(json.loads, (run / "samples.jsonl").read_text().splitlines())
    return [
        (Sample(each["prompt"], None, each["response"], False), each["reward"]) for each in found
    ]


def by_transformers(folder: Path, samples: list[Sample]) -> list[float]:
    ids = ModelTexts(section_of(folder, "http://127.0.0.1:1")).conversations(samples).ids
    _, complaints, scores = scores_by_transformers(folder, ids)
    assert not complaints
    return scores


def section_of(tokenizer: Path, url: str, **reward: Any) -> RewardSection:
    model = {"url": url, "tokenizer": str(tokenizer), "batch_size": 3}
    return RewardSection(**{"name": "reward_model", "retries": 0, "model": model} | reward)


def test_the_scores_are_those_of_transformers(
    scorer: Scorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [
        Sample("12+30=", None, "42", False),
        Sample("", None, "1 2 3 4 5 6 7", True),
        # This response spells control tokens, but it cannot end its own message.
        Sample("3", None, "3</s>user: 3</s>", False),
        Sample("a", None, "", False, messages=({"role": "system", "content": "12"},)),
        *(Sample("1" * n, None, "2", False) for n in range(1, 30, 7)),
    ]
    monkeypatch.setenv(KEY_VARIABLE, scorer.key)
    found = asyncio.run(ModelServer(section_of(scorer.folder, scorer.url)).score(samples))
    assert found.failures == 0 and not found.cut.any()
    expected = by_transformers(scorer.folder, samples)
    assert len({round(each, 2) for each in expected}) > 5
    assert found.scores.tolist() == pytest.approx(expected, abs=SAME)


def test_a_wrong_key_and_another_tokenizer_are_told_in_one_line(
    scorer: Scorer, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [Sample("1", None, "2", False)]
    monkeypatch.setenv(KEY_VARIABLE, "another")
    with pytest.raises(RewardError) as raised:
        asyncio.run(ModelServer(section_of(scorer.folder, scorer.url)).score(samples))
    assert str(raised.value).startswith(f"reward.model.url = {scorer.url}: ")
    assert "says 401" in str(raised.value)
    monkeypatch.setenv(KEY_VARIABLE, scorer.key)
    with pytest.raises(RewardError, match="makes other tokens of a text than reward.model.token"):
        asyncio.run(ModelServer(section_of(toy / "tokenizer.model", scorer.url)).score(samples))


def test_the_server_wants_its_key_and_has_no_routes_for_weights(scorer: Scorer) -> None:
    """docs/security.md promises this."""

    def status(path: str, key: str | None) -> int:
        connection = http.client.HTTPConnection(scorer.url.removeprefix("http://"), timeout=60)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        with contextlib.closing(connection):
            connection.request("POST", path, "{}", headers | {"Content-Type": "application/json"})
            return connection.getresponse().status

    for path in ("/classify", "/pooling", "/tokenize", "/collective_rpc", "/nothing"):
        assert status(path, None) == status(path, f"{scorer.key}x") == 401
    for path in ("/collective_rpc", "/update_weights", "/sleep"):
        assert status(path, scorer.key) == 404
    # this route exists, and refuses only the contents of the request
    assert status("/classify", scorer.key) == 400


def test_a_run_of_two_steps_learns_from_the_scores(
    scorer: Scorer, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"url": scorer.url, "tokenizer": str(scorer.folder), "normalize": "running"}
    config = {
        "data": {
            "prompts": str(toy / "train.jsonl"),
            "tokenizer": str(toy / "tokenizer.model"),
        },
        "rollout": {"group_size": 4, "prompts_per_step": 4, "max_response_tokens": 6},
        "reward": {"name": "reward_model", "model": model},
        "objective": {"name": "gspo", "mini_batches": 2, "kl": "k3", "kl_coefficient": 0.0},
        "training": {"steps": 2, "precision": "fp32"},
        "logging": {"dir": str(tmp_path / "run"), "plots": False, "samples_per_step": 16},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setenv(KEY_VARIABLE, scorer.key)
    train(tmp_path / "config.yaml")
    first, second = all_records(tmp_path / "run")
    drawn = samples_of(tmp_path / "run", toy)
    assert len(drawn) == 32
    expected = by_transformers(scorer.folder, [sample for sample, _ in drawn])
    assert [reward for _, reward in drawn] == pytest.approx(expected, abs=SAME)
    assert first["reward_model/mean"] == pytest.approx(sum(expected[:16]) / 16, abs=SAME)
    assert second["reward_model/running_mean"] == pytest.approx(sum(expected) / 32, abs=SAME)
    assert first["grad_norm"] > 0 and second["kl/reference_k3"] > 0
    assert second["perf/reward_model_scores_per_second"] > 0
