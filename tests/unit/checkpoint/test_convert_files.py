"""Conversion from files to files: every bit comes back, and a model loads the result."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo_megatron.checkpoint import convert, convert_source
from gspo_megatron.checkpoint.convert import hf_to_megatron, megatron_to_hf
from gspo_megatron.checkpoint.convert_adapters import any_to_hf
from gspo_megatron.checkpoint.convert_workers import WorkerShard
from gspo_megatron.checkpoint.folder import Publication
from gspo_megatron.checkpoint.manifest import files_below, find_damage, record_of
from gspo_megatron.checkpoint.run_state import describe_model
from gspo_megatron.checkpoint.storage import read_index
from gspo_megatron.checkpoint.tensors import load_model, save_tensors
from gspo_megatron.errors import DataError
from gspo_megatron.models.build import Policy
from tests.unit.hf.policies import config_of, policy_of
from tests.unit.hf.published import (
    ADDED_KEYS,
    CONFIGS,
    Variant,
    assert_same_bits,
    model_config,
    random_tensors,
    read_folder,
    variant_name,
    write_folder,
    write_model,
)

VARIANTS: list[Variant] = [
    *((family, {}) for family in CONFIGS),
    ("qwen3_moe", {"tie_word_embeddings": True}),
    ("qwen3", {"tie_word_embeddings": True}),
]


def there_and_back(source: Path, **options: Any) -> dict[str, Tensor]:
    """Import and export a folder. Returns the tensors of the export. The folders `ours` and `back`
    are beside the source."""
    ours, back = source.with_name("ours"), source.with_name("back")
    hf_to_megatron(source, ours)
    megatron_to_hf(ours, back, **options)
    return read_folder(back)


def test_it_works_without_megatron_core() -> None:
    code = "sys.modules['megatron'] = None; import gspo_megatron.checkpoint.convert"
    subprocess.run([sys.executable, "-c", f"import sys; {code}"], check=True)


@pytest.mark.parametrize("variant", VARIANTS, ids=variant_name)
def test_there_and_back_is_bit_for_bit(tmp_path: Path, variant: Variant) -> None:
    family, changes = variant
    ends = {"eos_token_id": [5, 7]}  # the tokens that end a response and a turn
    source = write_model(tmp_path / "hf", family, seed=3, **changes | ends)
    (source / "generation_config.json").write_text(json.dumps(ends | {"top_k": 3}))
    assert_same_bits(there_and_back(source, max_shard_bytes=30_000), read_folder(source))
    assert find_damage(tmp_path / "ours") == []
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 2
    for file in ("config.json", "generation_config.json"):
        ours, theirs = (json.loads((f / file).read_text()) for f in (tmp_path / "back", source))
        added = ADDED_KEYS.get(family, {}) if file == "config.json" else {}
        assert ours == theirs | added
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "hf", "ours"]


@pytest.mark.parametrize("limit", [100, 2_000, 20_000])
@pytest.mark.parametrize("family", ["qwen3_moe", "bailing_moe_v2"])
def test_any_block_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, limit: int
) -> None:
    """Blocks may end in the middle of an expert, a query group, a matrix or a row. In one of the
    families, queries, keys and values come from one matrix."""
    monkeypatch.setattr(convert, "_BLOCK_BYTES", limit)
    source = write_model(tmp_path / "hf", family, seed=4, num_hidden_layers=2)
    assert_same_bits(there_and_back(source), read_folder(source))
    stored = read_index(tmp_path / "ours/model").state_dict_metadata
    [experts] = [stored[key] for key in stored if key.endswith("mlp.experts.weight1")]
    assert (len(experts.chunks) > 12) == (limit < 20_000)


@pytest.mark.parametrize("family", ["qwen3", "minimax_m2", "ernie4_5_moe"])
def test_each_tensor_keeps_its_own_dtype(tmp_path: Path, family: str) -> None:
    """Norms and gates of routers are published in fp32 next to bf16 tensors."""
    config = model_config(family, torch_dtype="bfloat16")
    tensors = random_tensors(config, seed=6)
    for name, tensor in tensors.items():
        if "norm" in name or name.endswith(".gate.weight"):
            tensors[name] = tensor.float() + 2.0**-20
    assert_same_bits(there_and_back(write_folder(tmp_path / "hf", config, tensors)), tensors)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_bit_pattern(tmp_path: Path, dtype: str) -> None:
    """The bits are random: every exponent, NaN with payloads, and -0.0."""
    config = model_config("qwen3_moe", torch_dtype=dtype)
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, tensor in random_tensors(config, seed=5).items():
        bits = torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8, generator=generator)
        tensors[name] = bits.view(tensor.dtype).view(tensor.shape)
    assert_same_bits(there_and_back(write_folder(tmp_path / "hf", config, tensors)), tensors)


def test_dtype(tmp_path: Path) -> None:
    source = write_model(tmp_path / "hf", "qwen3_moe", seed=6)
    hf_to_megatron(source, tmp_path / "ours")
    hf_to_megatron(source, tmp_path / "ours16", dtype=torch.bfloat16)
    megatron_to_hf(tmp_path / "ours", tmp_path / "late", dtype=torch.bfloat16)
    megatron_to_hf(tmp_path / "ours16", tmp_path / "early")
    megatron_to_hf(tmp_path / "ours16", tmp_path / "wide", dtype=torch.float32)
    rounded = {name: t.to(torch.bfloat16) for name, t in read_folder(source).items()}
    assert_same_bits(read_folder(tmp_path / "late"), rounded)
    assert_same_bits(read_folder(tmp_path / "early"), rounded)
    widened = {name: tensor.float() for name, tensor in rounded.items()}
    assert_same_bits(read_folder(tmp_path / "wide"), widened)
    written = {f: json.loads((tmp_path / f / "config.json").read_text()) for f in ("late", "wide")}
    assert written["late"]["torch_dtype"] == "bfloat16"
    assert written["wide"]["torch_dtype"] == "float32"


@pytest.mark.parametrize(
    ("family", "ends"),
    [("deepseek_v3", ("e_score_correction_bias",)), ("qwen3_next", ("A_log", "dt_bias"))],
)
def test_what_a_model_keeps_in_fp32_is_not_rounded(
    tmp_path: Path, family: str, ends: tuple[str, ...]
) -> None:
    source = write_model(tmp_path / "hf", family, seed=6)
    hf_to_megatron(source, tmp_path / "ours", dtype=torch.bfloat16)
    megatron_to_hf(tmp_path / "ours", tmp_path / "back", dtype=torch.bfloat16)
    back = read_folder(tmp_path / "back")
    kept = {name for name in back if name.endswith(ends)}
    assert kept
    rounded = {
        name: tensor if name in kept else tensor.to(torch.bfloat16)
        for name, tensor in read_folder(source).items()
    }
    assert_same_bits(back, rounded)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("variant", VARIANTS, ids=variant_name)
def test_a_model_loads_what_was_converted(tmp_path: Path, variant: Variant) -> None:
    """The result has the tensors that a model of this shape saves. Its weights equal those that the
    model reads from the folder."""
    family, changes = variant
    source = write_model(tmp_path / "hf", family, seed=7, **changes)
    hf_to_megatron(source, tmp_path / "ours")
    policy = policy_of(config_of(source))
    save_tensors(tmp_path / "saved", policy, None, asynchronous=False).result()
    converted, saved = (read_index(tmp_path / f / "model") for f in ("ours", "saved"))
    described = [
        {k: (tuple(entry.size), entry.properties.dtype) for k, entry in entries.items()}
        for entries in (converted.state_dict_metadata, saved.state_dict_metadata)
    ]
    assert described[0] == described[1]
    formats = [(tmp_path / f / "model/metadata.json").read_text() for f in ("ours", "saved")]
    assert json.loads(formats[0]) == json.loads(formats[1])
    weights = emptied(policy)
    load_model(tmp_path / "ours", policy)
    assert_same_bits(dict(policy.models[0].named_parameters()), weights)


def emptied(policy: Policy) -> dict[str, Tensor]:
    """Copy the weights of a model on one rank, then overwrite the weights in the model."""
    (model,) = policy.models
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(9.0)
    return weights


@pytest.mark.usefixtures("one_rank")
def test_stock_megatron_core_loads_what_was_converted(tmp_path: Path) -> None:
    from megatron.core import dist_checkpointing

    # A vocabulary of 48 needs no padding.
    source = write_model(tmp_path / "hf", "qwen3_moe", seed=8, vocab_size=48)
    hf_to_megatron(source, tmp_path / "ours")
    policy = policy_of(config_of(source))
    expected = emptied(policy)
    entries = policy.models[0].sharded_state_dict(metadata={"non_homogeneous_layers": True})
    wanted = {name: entry for name, entry in entries.items() if "_extra_state" not in name}
    loaded = dist_checkpointing.load(wanted, str(tmp_path / "ours/model"))
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe"])
def test_export_of_what_a_model_saved(tmp_path: Path, family: str) -> None:
    source = write_model(tmp_path / "hf", family, seed=9)
    config = config_of(source)
    policy = policy_of(config)
    new = Publication(tmp_path, "rl_00000003")
    new.begin()
    save_tensors(new.folder, policy, None, asynchronous=False).result()
    document = describe_model(config, policy.vocab_size) | {"tokenizer": None}
    (new.folder / "model.json").write_text(json.dumps(document))
    new.publish({name: record_of(new.folder / name) for name in files_below(new.folder)})
    megatron_to_hf(tmp_path / "rl_00000003", tmp_path / "back")
    assert_same_bits(read_folder(tmp_path / "back"), read_folder(source))


def in_processes(count: int, work: Callable[[WorkerShard], object]) -> list[BaseException]:
    """Run `work` in threads that take the place of processes which convert together. Returns their
    errors."""
    barrier = threading.Barrier(count, timeout=60)
    values: list[Any] = [None] * count
    failures: list[BaseException] = []

    def be(rank: int) -> None:
        def gather(value: Any) -> list[Any]:
            values[rank] = value
            barrier.wait()
            gathered = list(values)
            barrier.wait()
            return gathered

        try:
            work(WorkerShard(rank, count, gather))
        except DataError as error:  # all processes raise this error
            failures.append(error)
        except BaseException as error:  # noqa: BLE001 (for the main thread to show)
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=be, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def test_several_processes_write_one_folder(tmp_path: Path) -> None:
    """Each process writes its own files, and the processes wait for each other."""
    source = write_model(tmp_path / "hf", "qwen3_moe", seed=10)
    hf_to_megatron(source, tmp_path / "ours")
    back = tmp_path / "back"
    assert not in_processes(3, lambda shard: megatron_to_hf(tmp_path / "ours", back, shard=shard))
    assert len(list(back.glob("*.safetensors"))) >= 3
    assert_same_bits(read_folder(back), read_folder(source))


def test_several_processes_take_one_checkpoint_of_a_run_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run publishes a checkpoint just after the first process has listed the checkpoints."""
    sources = [write_model(tmp_path / f"hf{seed}", "qwen3", seed=seed) for seed in (11, 12)]
    checkpoints, lock = tmp_path / "run/checkpoints", threading.Lock()
    names = ["rl_00000001", "rl_00000002"]
    checkpoints.mkdir(parents=True)
    hf_to_megatron(sources[0], checkpoints / names[0])
    hf_to_megatron(sources[1], tmp_path / "next")
    look = convert_source.checkpoints_at

    def look_and_publish(path: Path) -> list[Path]:
        with lock:
            found = look(path)
            if (tmp_path / "next").exists():
                (tmp_path / "next").rename(checkpoints / names[1])
            return found

    monkeypatch.setattr(convert_source, "checkpoints_at", look_and_publish)
    back = tmp_path / "back"
    assert not in_processes(2, lambda shard: any_to_hf(tmp_path / "run", back, shard=shard))
    assert [p.name for p in look(checkpoints)] == names[::-1]
    assert_same_bits(read_folder(back), read_folder(sources[0]))


@pytest.mark.parametrize("problem", ["no checkpoint", "destination in use"])
def test_all_processes_fail_together(tmp_path: Path, problem: str) -> None:
    source, back = tmp_path / "ours", tmp_path / "back"
    if problem == "destination in use":
        hf_to_megatron(write_model(tmp_path / "hf", "qwen3", seed=13), source)
        write_model(back, "qwen3", seed=13)
    failures = in_processes(3, lambda shard: megatron_to_hf(source, back, shard=shard))
    assert [type(error) for error in failures] == [DataError] * 3
    assert len({str(error) for error in failures}) == 1
