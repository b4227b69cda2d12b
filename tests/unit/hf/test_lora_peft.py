"""Our adapters compared with PEFT's adapters on the same model: logits, loss, gradients, updates
and files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from gspo_megatron.checkpoint.convert_adapters import Adapters, any_to_hf, peft_to_megatron
from gspo_megatron.config import Config
from gspo_megatron.config.lora import LoraSection
from gspo_megatron.config.schema import OptimizerSection
from gspo_megatron.families import family_of
from gspo_megatron.families.adapter_map import adapter_map
from gspo_megatron.families.weight_map import weight_map
from gspo_megatron.hf.adapters import PeftFolder
from gspo_megatron.hf.export import export_adapter, export_hf
from gspo_megatron.hf.files import checked_folder
from gspo_megatron.hf.joint_adapters import LEAVES
from gspo_megatron.hf.load import adapter_shards, load_adapters
from gspo_megatron.models.build import Policy
from gspo_megatron.models.optimizer import Schedule, build_trainer, zero_gradients
from tests.unit.hf.peft_side import (
    ALPHA,
    CLIP,
    DECAY,
    EPSILON,
    RANK,
    RATE,
    Taught,
    adapt_parameters,
    logits_with,
    teach,
)
from tests.unit.hf.policies import config_of, logits_of, policy_of
from tests.unit.hf.published import DELTA_NETS, VOCABULARY, read_folder, write_model
from tests.unit.hf.test_hf_models import DELTA_TOLERANCE
from tests.unit.hf.transformers_side import ask, transformers_process

pytestmark = pytest.mark.usefixtures("one_rank")
pytest.importorskip("peft")

# The tolerance is for fp32 sums in another order. Gradients are compared relative to the largest
# element of their matrix.
TOLERANCE = 1e-5
IDS = [int(token) for token in torch.randint(VOCABULARY, (40,), generator=torch.Generator())]

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
CASES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    # Each value: the family, changed keys of its config.json, PEFT's target modules.
    "qwen3": ("qwen3", {}, LINEAR),
    "some of them": ("qwen3", {}, ["q_proj", "v_proj", "up_proj"]),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}, LINEAR),
    # PEFT would also adapt the MLPs of dense layers, because their matrices have the same names as
    # the experts' matrices. So all layers of this model have experts.
    "qwen3_moe": ("qwen3_moe", {"mlp_only_layers": []}, LINEAR),
    # PEFT adapts the router's matrix as a parameter, but its adapter has the names of a module's
    # adapter.
    "router and head": ("qwen3_moe", {"mlp_only_layers": []}, ["q_proj", "gate", "lm_head"]),
    "latent": ("deepseek_v3", {}, LATENT),
    "latent, no query latent": (
        "deepseek_v3",
        {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 3},
        ["q_proj", *LATENT[2:]],
    ),
}


def with_lora(config: Config, **lora: Any) -> Config:
    section = LoraSection(**lora)
    return config.model_copy(update={"model": config.model.model_copy(update={"lora": section})})


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    with transformers_process() as executor:
        yield executor


@pytest.fixture(scope="module")
def taught(
    process: ProcessPoolExecutor, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Taught, LoraSection]]:
    """The results of `teach` for each case: the folder of model and adapter, PEFT's results, and
    model.lora."""
    root, found = tmp_path_factory.mktemp("peft"), {}
    for number, (name, (family, changes, targets)) in enumerate(CASES.items()):
        folder = root / str(number)
        use_rslora = name == "qwen2, tied"
        write_model(folder / "model", family, seed=number, **changes)
        arguments = (folder / "model", folder / "adapter", IDS, targets, use_rslora)
        answer = process.submit(teach, *arguments).result()
        lora = LoraSection(rank=RANK, alpha=float(ALPHA), targets=targets, use_rslora=use_rslora)
        found[name] = (folder, answer, lora)
    return found


def adapted_policy(folder: Path, lora: LoraSection, model: str = "model") -> Policy:
    config = with_lora(config_of(folder / model), **lora.model_dump())
    policy = policy_of(config)
    load_adapters(folder / "adapter", policy, lora, config.model.family(policy.shape))
    return policy


def in_peft_layout(policy: Policy, part: str) -> dict[str, Tensor]:
    assert policy.lora is not None
    names = adapter_map(policy.lora.adapted, policy.lora.rank).recipes
    found = {}
    for shard in adapter_shards(policy):
        recipe = names[shard.name]
        tensor = shard.view(getattr(shard.parameter, part))
        assert not tensor[recipe.shape[0] :].any()  # rows of the vocabulary's padding are zero
        found[recipe.boxes[0].name] = tensor[: recipe.shape[0]].clone()
    return found


def loss_of(policy: Policy) -> tuple[Tensor, Tensor]:
    [model] = policy.models
    positions = torch.arange(len(IDS))[None]
    # Hooks of the chunk sum the gradients. So the test calls the chunk, not the model inside it.
    hidden = policy.chunks[0](
        input_ids=torch.tensor([IDS]), position_ids=positions, attention_mask=None
    )
    hidden, weight = model.head_product(hidden[0])
    logits = hidden @ weight[:VOCABULARY].t()
    return logits, F.cross_entropy(logits[:-1], torch.tensor(IDS[1:]))


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = float((found[name] - tensor).abs().max())
        assert difference <= TOLERANCE * max(1.0, float(tensor.abs().max())), name


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_gradients_and_updates_are_pefts(
    taught: dict[str, tuple[Path, Taught, LoraSection]], case: str
) -> None:
    folder, expected, lora = taught[case]
    policy = adapted_policy(folder, lora)
    policy.eval()  # turns off auxiliary losses
    section = OptimizerSection(
        learning_rate=RATE, clip_grad=CLIP, weight_decay=DECAY, epsilon=EPSILON
    )
    trainer = build_trainer(policy, section, Schedule(RATE, RATE, 0, 5, "constant"))
    for update in range(1, 6):
        zero_gradients(policy.chunks, trainer.optimizer)
        logits, loss = loss_of(policy)
        loss.backward()
        assert policy.config.finalize_model_grads_func is not None
        policy.config.finalize_model_grads_func(policy.chunks)
        gradients = in_peft_layout(policy, "main_grad")
        norm, _ = trainer.update()
        if update == 1:
            assert float((logits - expected.logits).abs().max()) <= TOLERANCE
            assert loss.item() == pytest.approx(expected.loss, abs=TOLERANCE)
            assert_close(gradients, expected.gradients)
            assert norm == pytest.approx(expected.norm, rel=TOLERANCE)
        if update in (1, 5):
            assert_close(in_peft_layout(policy, "data"), expected.after[update])


@pytest.mark.parametrize("case", ["qwen3", "qwen3_moe", "router and head", "latent"])
def test_without_adapters_the_policy_is_its_base_bit_for_bit(
    taught: dict[str, tuple[Path, Taught, LoraSection]], case: str
) -> None:
    folder, _, lora = taught[case]
    base = logits_of(policy_of(config_of(folder / "model")), IDS)
    policy = adapted_policy(folder, lora)
    assert policy.lora is not None
    assert float((logits_of(policy, IDS) - base).abs().max()) > 0.1
    with policy.lora.off():
        assert torch.equal(logits_of(policy, IDS), base)


@pytest.mark.parametrize("case", CASES)
def test_merged_the_model_computes_the_same_in_transformers(
    taught: dict[str, tuple[Path, Taught, LoraSection]],
    process: ProcessPoolExecutor,
    tmp_path: Path,
    case: str,
) -> None:
    folder, expected, lora = taught[case]
    export_hf(adapted_policy(folder, lora), tmp_path / "merged")
    answer = process.submit(ask, tmp_path / "merged", IDS, [], 0).result()
    assert not answer.complaints
    assert float((answer.logits - expected.logits).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_5_moe_text"])
def test_experts_in_one_tensor_leave_as_pefts_parameters(
    process: ProcessPoolExecutor, tmp_path: Path, family: str
) -> None:
    """The adapter is also merged in two ways: from the shards of the policy, and block by block
    from the files of the base."""
    base = write_model(tmp_path / "base", family, seed=3)
    use_rslora = family == "gpt_oss"
    alpha = ALPHA / RANK**0.5 if use_rslora else float(ALPHA)  # the same scale for both
    lora = LoraSection(rank=RANK, alpha=alpha, use_rslora=use_rslora, targets=["all"])
    policy = policy_of(with_lora(config_of(base), **lora.model_dump()))
    before = logits_of(policy, IDS)
    with torch.no_grad():
        for shard in adapter_shards(policy):
            shard.data.copy_(0.15 * torch.randn(shard.data.shape))
    expected = logits_of(policy, IDS)
    assert float((expected - before).abs().max()) > 0.1
    hf_config = json.loads((base / "config.json").read_text())
    export_adapter(policy, tmp_path / "adapter", lora, str(base), hf_config=hf_config)
    found = process.submit(logits_with, base, tmp_path / "adapter", IDS).result()
    assert_comes_back(tmp_path, policy, lora)
    # The tolerance is the same as for the base model.
    tolerance = DELTA_TOLERANCE if family in DELTA_NETS else TOLERANCE
    assert float((found - expected).abs().max()) <= tolerance
    export_hf(policy, tmp_path / "merged", hf_config=hf_config)
    answer = process.submit(ask, tmp_path / "merged", IDS, [], 0).result()
    assert not answer.complaints
    assert float((answer.logits - expected).abs().max()) <= tolerance
    assert_files_merge_to(tmp_path / "merged", base, policy, lora)


def assert_comes_back(folder: Path, policy: Policy, lora: LoraSection) -> None:
    """Check that a run can start from an exported adapter, and that its conversion in both
    directions keeps every bit."""
    again = adapted_policy(folder, lora, "base")
    ours, theirs = (in_peft_layout(each, "data") for each in (policy, again))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    peft_to_megatron(folder / "adapter", folder / "checkpoint")
    any_to_hf(folder / "checkpoint", folder / "back", as_peft=True)
    first, second = (
        load_file(folder / name / "adapter_model.safetensors") for name in ("adapter", "back")
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_5_moe_text"])
@pytest.mark.parametrize("parameters", [["gate_up_proj", "down_proj"], ["gate_up_proj"]])
def test_pefts_own_adapters_of_experts_enter(
    process: ProcessPoolExecutor, tmp_path: Path, family: str, parameters: list[str]
) -> None:
    """PEFT does not double the rank, so gate and up projection share A."""
    base = write_model(tmp_path / "base", family, seed=5)
    named = [f"mlp.experts.{name}" for name in parameters]
    # For qwen3_5, PEFT also adapts the shared experts, whose matrices have the same names.
    modules = ["q_proj", "o_proj"]
    if family != "gpt_oss":
        modules += [each for name in parameters for each in LEAVES[name]]
    arguments = (base, tmp_path / "adapter", IDS, modules, named)
    expected = process.submit(adapt_parameters, *arguments).result()
    lora = PeftFolder(tmp_path / "adapter").settings()
    assert lora.rank == RANK
    policy = adapted_policy(tmp_path, lora, "base")
    # The tolerance is the same as for the base model.
    tolerance = DELTA_TOLERANCE if family in DELTA_NETS else TOLERANCE
    assert float((logits_of(policy, IDS) - expected).abs().max()) <= tolerance


def assert_files_merge_to(merged: Path, base: Path, policy: Policy, lora: LoraSection) -> None:
    """Check that the base's files plus the adapters, added block by block, give the files in
    `merged`. In some families, an export has one tensor for each expert, but a published file has
    one tensor for all experts."""
    folder, files = checked_folder(base, policy.shape, policy.vocab_size)
    _, written_files = checked_folder(merged, policy.shape, policy.vocab_size)
    written, family = read_folder(merged), family_of(folder.config)
    weights = weight_map(family, policy.shape, policy.vocab_size)
    tensors, checkpoint = in_peft_layout(policy, "data"), cast(Any, None)
    assert policy.lora is not None
    adapters = Adapters(checkpoint, lora, {}, weights, dict(policy.lora.adapted), tensors)
    add = adapters.merging(files)
    for name, shape in files.shapes.items():
        # The slices select a part of the experts and a part of the columns.
        slices = (slice(shape[0] // 3, shape[0]), *(slice(0, -(-n * 2 // 3)) for n in shape[1:]))
        whole = tuple(slice(0, size) for size in shape)
        block, full = (add(name, part, folder.read(name, part).clone()) for part in (slices, whole))
        assert float((block - full[slices]).abs().max()) <= TOLERANCE, name
        if name in written:
            assert float((full - written[name]).abs().max()) <= TOLERANCE, name
            continue
        for key, box in ((k, b) for k, r in files.recipes.items() for b in r.boxes):
            if box.name == name:
                others = written_files.recipes[key].boxes
                [other] = [each for each in others if each.target == box.target]
                theirs = written[other.name][other.source_slices].reshape(box.size)
                ours = box.to_target(full[box.source_slices])
                assert float((ours - theirs).abs().max()) <= TOLERANCE, name
