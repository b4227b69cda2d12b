"""A server that does not fit the run is refused before the first step. One line names all of its
faults."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gspo_megatron.data.tokenizers import load_tokenizer
from gspo_megatron.errors import RolloutError
from gspo_megatron.rollout.vllm.checks import Needs, check_server, tokenized
from gspo_megatron.rollout.vllm.client import ServerClient, connected_session
from gspo_megatron.rollout.vllm.process import WORKER
from tests.unit.data.corpora import make_tokenizer
from tests.vllm.runs import make_run
from tests.vllm.servers import Server, serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def faults(server: Server, folder: Path, **needs: Any) -> list[str]:
    """The faults that the check of the server finds. `folder` has the trainer's weights."""
    wanted = Needs(**{"max_model_len": 64, "dtype": "float32", "with_routes": False, **needs})

    async def check() -> None:
        async with connected_session() as session:
            client = ServerClient(server.url, session)
            assert (await check_server(client, wanted, str(folder), seconds=60)).can_stream

    try:
        asyncio.run(check())
    except RolloutError as error:
        (line,) = str(error).splitlines()
        return line.split("; ")
    return []


def test_a_server_of_another_model_is_refused_with_every_difference(
    vllm_server: Server, tiny_qwen3_moe: Callable[[int], Path], tmp_path: Path
) -> None:
    config = json.loads((tiny_qwen3_moe(0) / "config.json").read_text())

    def found(**changes: Any) -> list[str]:
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        return faults(vllm_server, tmp_path, with_routes=True)

    def line(key: str, server: object, trainer: object) -> str:
        return f"serves a model of model.{key} = {server}, the trainer's has {trainer}"

    assert found() == []
    assert found(num_hidden_layers=6, vocab_size=300) == [
        line("vocab_size", 257, 300),
        line("megatron.num_layers", 4, 6),
    ]
    assert found(hidden_size=128, moe_intermediate_size=32) == [
        line("megatron.hidden_size", 64, 128),
        line("megatron.moe_ffn_hidden_size", 64, 32),
    ]
    # The key has two spellings. The test changes the spelling that this version of transformers
    # writes, because two keys with different values would contradict each other.
    (spelling,) = {"num_experts", "num_local_experts"} & config.keys()
    assert found(**{spelling: 16}) == [line("megatron.num_moe_experts", 8, 16)]
    # The weights have the same shapes, but the model computes another function.
    assert found(num_experts_per_tok=3) == [line("megatron.moe_router_topk", 2, 3)]
    rope = {"rope_type": "default", "rope_theta": 5e5}
    assert found(rope_parameters=rope) == [line("rotary_base", 10000.0, 500000.0)]


@pytest.fixture(scope="module")
def wrong_server(
    vllm_python: Path,
    tiny_qwen3_moe: Callable[[int], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Server, Path]]:
    """A server that runs with vLLM's default settings and whose model has another tokenizer; and
    the folder of the model."""
    folder = tmp_path_factory.mktemp("wrong")
    model = folder / "model"
    shutil.copytree(tiny_qwen3_moe(0), model)
    made = make_tokenizer(folder / "tokenizer", "bpe", vocab_size=400)
    shutil.copytree(made, model, dirs_exist_ok=True, ignore=lambda *_: {"config.json"})
    options = {"model": str(model), "dtype": "bfloat16", "enforce_eager": True, "max_model_len": 64}
    options["worker_extension_cls"] = WORKER
    with serve(vllm_python, folder, options) as server:
        yield server, model


def test_only_the_trainer_s_tokenizer_will_do(
    wrong_server: tuple[Server, Path], tmp_path: Path
) -> None:
    server, model = wrong_server
    refused = "has another tokenizer than data.tokenizer: --tokenizer"
    for folder, expected in (
        (model, 0),
        (make_tokenizer(tmp_path / "tokenizer", "char", vocab_size=400), 1),
    ):
        own = tokenized(load_tokenizer(folder), is_needed=False)
        found = faults(server, model, dtype="bfloat16", tokenized=own)
        assert found.count(refused) == expected, found
    assert tokenized(load_tokenizer(model / "tokenizer.model"), is_needed=False) is None


def test_a_run_names_all_that_is_wrong_behind_its_url(
    wrong_server: tuple[Server, Path], vllm_python: Path, tmp_path: Path
) -> None:
    server, _ = wrong_server
    run = make_run(
        tmp_path,
        vllm_python,
        data={
            "tokenizer": str(make_tokenizer(tmp_path / "tokenizer")),
            "prompts": str(tmp_path / "toy" / "train.jsonl"),
        },
        rollout={"vllm": {"servers": 0, "python": None, "urls": [server.url]}},
        model={"megatron": {"kv_channels": 32, "num_layers": 2}},
        routing={"replay": "r3"},
    )
    said = run.finish(run.start(), code=2)
    assert "Traceback" not in said
    line = said.splitlines()[-1]
    name, *found = re.split(r": (?=does not answer)|; ", line)
    assert name == f"server {server.url}"
    assert found == [
        "does not answer /inference/v1/generate: --enable-scale-out",
        "gives raw_logprobs: --logprobs-mode processed_logprobs",
        "gives no experts (routing r3): --enable-return-routed-experts",
        "computes in torch.bfloat16: --dtype float32",
        "takes 64 tokens: --max-model-len 128",
        "serves a model of model.vocab_size = 257, the trainer's has 500",
        "serves a model of model.tie_embeddings = true, the trainer's has false",
        "serves a model of model.megatron.num_layers = 4, the trainer's has 2",
        "has another tokenizer than data.tokenizer: --tokenizer",
    ]
    assert not run.steps() and not run.services()
