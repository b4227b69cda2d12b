"""Updates with Transformer Engine's layers on the rehearsed device. The stand-in refuses the calls
that Transformer Engine refuses. The updates equal the updates with the layers of torch_native."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from gspo_megatron.config import Config, parse_config
from gspo_megatron.config.precision import FP8
from gspo_megatron.families.weight_map import native_name
from gspo_megatron.verify.results import StepResult, compare
from gspo_megatron.verify.synthetic import synthetic_batch
from tests.cuda_rehearsal.conftest import MakeConfig
from tests.cuda_rehearsal.engine.plants import PLANTS, refusals
from tests.cuda_rehearsal.engine.tables import versions
from tests.cuda_rehearsal.engine.tasks import gpu_task, train_on_a_gpu, with_calls
from tests.cuda_rehearsal.faults import Fault, with_fault
from tests.cuda_rehearsal.host import Host
from tests.gpu.test_precision import TOLERANCE, distance
from tests.parallel.pool import RankError
from tests.parallel.test_attention_kinds import update_from_folder
from tests.parallel.test_shared_prompts import grouped_batch
from tests.parallel.updates import CUT, FP32_TOLERANCE
from tests.unit.hf.published import VOCABULARY, write_model

ENGINE = "transformer_engine"
PIN, LATEST = versions()[0], versions()[-1]
# bf16 keeps 8 bits, so each operand is rounded by up to 2**-9. The largest difference measured over
# 4 layers was 0.014 of a gradient.
BF16_TOLERANCE = 0.03
# Queries and keys of a head have 16 channels, and all norms of a model have the same epsilon.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"hidden_size": 48, "num_attention_heads": 4, "head_dim": 16},
    "qwen2_moe": {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16},
    "deepseek_v3": {"rms_norm_eps": 1e-6},
    "qwen3_next": {"hidden_size": 48, "num_attention_heads": 4},
}


@dataclass(frozen=True)
class Run:
    layout: str
    family: str = "qwen3_moe"
    precision: str = "fp32"
    version: str = PIN
    megatron: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)


SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
    "ffn_hidden_size": 64,
    "moe_ffn_hidden_size": 32,
    "num_moe_experts": 4,
}
FUSED = {"apply_rope_fusion": True, "moe_permute_fusion": True}
RUNS = {
    "one rank": Run("tp=1", version=LATEST),
    # Both ranks have copies of the experts, but different tokens.
    "tp=2": Run("tp=2"),
    "ep=2 with fusions": Run("ep=2", megatron=FUSED),
    "ep=2 with fusions, later": Run("ep=2", megatron=FUSED, version=LATEST),
    "ep=2 by allgather": Run(
        "ep=2", megatron={"moe_token_dispatcher_type": "allgather", "moe_permute_fusion": True}
    ),
    "pp=2 with recomputation": Run("pp=2", training={"recompute": "full"}),
    # Both ranks have some projections completely. In attention, the size of the values differs from
    # the size of the keys.
    "latent attention on tp=2": Run("tp=2", "deepseek_v3"),
    # The input projection of a delta net contains the norm before it. The weights of norms are
    # offsets to 1, except the weight of the norm after a delta net's rule.
    "delta nets on tp=2": Run("tp=2", "qwen3_next"),
    "a fused router and shared experts": Run(
        "tp=1", "qwen2_moe", megatron={"moe_router_fusion": True, "moe_aux_loss_coeff": 0.01}
    ),
    "adapters on tp=2": Run("tp=2", "qwen2_moe", lora={"rank": 4}),
    "adapters of latent attention": Run("tp=1", "deepseek_v3", version=LATEST, lora={"rank": 4}),
    "shared prompts with fusions": Run("ep=2", megatron=FUSED, training={"share_prompts": True}),
    "shared prompts of latent attention": Run(
        "tp=2", "deepseek_v3", version=LATEST, training={"share_prompts": True}
    ),
    "rows of their own": Run("tp=1", training={"packing": False}),
    "cp=2": Run("cp=2", precision="bf16", megatron={"apply_rope_fusion": True}),
    "cp=2, later": Run("cp=2", precision="bf16", version=LATEST),
}

# The names of transformer_engine.pytorch that the runs together must call.
CALLED = {
    *("DotProductAttention", "DotProductAttention.forward"),
    *("GroupedLinear", "GroupedLinear.forward"),
    *("LayerNormLinear", "LayerNormLinear.forward"),
    *("Linear", "Linear.forward", "RMSNorm"),
    *("permutation.moe_permute", "permutation.moe_unpermute"),
}


def native(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    return {native_name(name): gradient for name, gradient in gradients.items()}


class Engines:
    """Runs tasks with the stand-in for one version of Transformer Engine. Results are cached."""

    def __init__(self, models: Path) -> None:
        self._models = models
        self._hosts = {version: Host(version) for version in {PIN, LATEST}}
        self._known: dict[tuple[str, str], StepResult] = {}
        self.called: dict[str, set[str]] = {version: set() for version in self._hosts}

    def run(self, version: str, ranks: int, task: Callable[..., Any], **arguments: Any) -> Any:
        answers = self._hosts[version].run(ranks, with_calls, task=task, **arguments)
        self.called[version] |= set().union(*(names for _, names in answers))
        return answers[0][0]

    def host(self, version: str) -> Host:
        return self._hosts[version]

    def arguments(
        self, name: str, backend: str, precision: str | None = None
    ) -> tuple[Config, dict[str, Any]]:
        """The arguments for update_from_folder."""
        run = RUNS[name]
        config = parse_config(
            {
                "model": {
                    "hf_path": str(self._models / run.family),
                    "backend": backend,
                    # This value is larger than usual; see ODD_MOE.
                    "megatron": {"init_method_std": 0.15, **run.megatron},
                    "lora": run.lora,
                },
                "parallel": {"layout": run.layout},
                "data": {"tokenizer": "none"},
                "training": {"precision": precision or run.precision, **run.training},
            }
        )
        batch = synthetic_batch(config.objective, VOCABULARY)
        if config.training.share_prompts:
            batch = grouped_batch(VOCABULARY)
        return config, {"config": config, "vocab_size": VOCABULARY, "batch": batch, "cut": CUT}

    def update(self, name: str, backend: str) -> StepResult:
        if (name, backend) not in self._known:
            config, arguments = self.arguments(name, backend)
            version, ranks = RUNS[name].version, config.world_size_hint()
            found = self.run(version, ranks, update_from_folder, **arguments)
            self._known[name, backend] = found
        return self._known[name, backend]

    def gpu_task(self, name: str, precision: str, **arguments: Any) -> Any:
        folder = self._models / "hf"
        if not folder.exists():
            self.run(LATEST, 1, gpu_task, name="make", folder=folder)
        arguments |= {"name": name, "folder": folder, "precision": precision}
        return self.run(LATEST, 1, gpu_task, **arguments)

    def close(self) -> None:
        for host in self._hosts.values():
            host.close()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("models")
    for family, sizes in FAMILIES.items():
        write_model(folder / family, family, seed=1, **sizes)
    engines = Engines(folder)
    yield engines
    engines.close()


@pytest.mark.parametrize("name", RUNS)
def test_the_update_is_that_of_torch_native(engines: Engines, name: str) -> None:
    tolerance = FP32_TOLERANCE if RUNS[name].precision == "fp32" else BF16_TOLERANCE
    expected, found = (engines.update(name, backend) for backend in ("torch_native", ENGINE))
    reference = native(expected.gradients)
    # Transformer Engine has one matrix for an expert's gate and up projections, torch_native two.
    gradients = {n: g.view(reference[n].shape) for n, g in native(found.gradients).items()}
    worst, error = compare(reference, gradients)[0]
    print(f"{name}: {worst} is off by {error:.1e}")
    assert error <= tolerance, f"{worst} is off by {error:.1e}"
    assert found.replica_error <= tolerance
    for metric in ("loss", "grad_norm"):
        assert found.metrics[metric] == pytest.approx(expected.metrics[metric], rel=tolerance)


@pytest.mark.parametrize("precision", FP8)
def test_fp8_is_near_fp32(engines: Engines, precision: str) -> None:
    """Operands are rounded to FP8 as the recipe says. The scales follow the histories that the
    recipe keeps."""
    expected = engines.gpu_task("step", "fp32", backend="torch_native")
    found = engines.gpu_task("step", precision, backend=ENGINE)
    error = distance(found["gradients"], expected["gradients"])
    print(f"{precision}: {error:.3f}")
    assert 0.02 < error < TOLERANCE[precision]  # bf16 alone differs by 0.016
    assert math.isclose(found["loss"], expected["loss"], rel_tol=0.02)


@pytest.mark.parametrize("precision", ["bf16", *FP8])
def test_resuming_restores_what_fp8_scales_by(
    engines: Engines, tmp_path: Path, precision: str
) -> None:
    checkpoint = str(tmp_path / "checkpoint")
    found = engines.gpu_task("resume", precision, backend=ENGINE, checkpoint=checkpoint)
    saved, loaded = found["saved scales"], found["loaded scales"]
    assert bool(saved) == (precision == "fp8-delayed")
    assert saved.keys() == loaded.keys()
    assert all(saved[key].equal(loaded[key]) for key in saved)
    histories = [tensor for key, tensor in saved.items() if key.startswith("fp8.amax_history_fwd")]
    assert all(history.max() > 0 for history in histories)
    assert found["saved"].equal(found["loaded"])


def test_training_goes_on_by_another_layout(engines: Engines, make_config: MakeConfig) -> None:
    """A run in FP8 with recomputation uses the command's code: rollouts in bf16, checkpoints, and
    resuming."""
    run = {
        "training__precision": "fp8-delayed",
        "training__recompute": "full",
        "checkpoint__interval": 1,
        "model__megatron": {**SIZES, "normalization": "LayerNorm"},
    }
    config = make_config(**run, parallel__layout="tp=2")
    steps = engines.run(PIN, 2, train_on_a_gpu, config=config)
    folder = config.logging.dir
    more = make_config(**run, parallel__layout="ep=2", training__steps=3, logging__dir=folder)
    steps = engines.run(PIN, 2, train_on_a_gpu, config=more)
    assert [step["step"] for step in steps[-3:]] == [1, 2, 3]
    assert all(math.isfinite(step["loss"]) and step["grad_norm"] > 0 for step in steps[-3:])


@pytest.mark.parametrize("version", sorted({PIN, LATEST}))
def test_each_mistake_is_refused_by_the_name_of_its_argument(
    engines: Engines, version: str
) -> None:
    found = engines.run(version, 1, refusals)
    assert found.keys() == PLANTS.keys()
    for name, plant in PLANTS.items():
        if plant.only in (None, version):
            assert f": {plant.argument} is " in found[name], f"{name}: {found[name]!r}"
            assert f"Transformer Engine {version} demands" in found[name]
        else:
            assert found[name] == "", name


# These faults are in the package, where a change of the code could introduce them.
FAULTS = {
    "cu_seqlens_q is a tensor": Fault(
        "gspo_megatron.batching.packing:pack",
        "boundaries=torch.tensor(boundaries, dtype=torch.int32)",
        "boundaries=torch.tensor(boundaries, dtype=torch.int64)",
    ),
    "max_seqlen_kv is ": Fault(
        "gspo_megatron.models.shared_prompts:packed_params",
        '"max_seqlen_kv": longest',
        '"max_seqlen_kv": 1',
    ),
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_fault_in_the_stack_is_refused(engines: Engines, message: str) -> None:
    config, arguments = engines.arguments("tp=2", ENGINE)
    arguments |= {"fault": FAULTS[message], "task": update_from_folder}
    with pytest.raises(RankError, match=message):
        engines.host(PIN).run(config.world_size_hint(), with_fault, **arguments)


def test_fp32_under_context_parallelism_is_refused_in_words(engines: Engines) -> None:
    config, arguments = engines.arguments("cp=2", ENGINE, precision="fp32")
    with pytest.raises(RankError, match=r"parallel.context_parallel_size = 2: attention of"):
        engines.host(PIN).run(config.world_size_hint(), update_from_folder, **arguments)


def test_the_runs_call_the_layers(engines: Engines) -> None:
    """If the package chose a wrong specification, the model would have layers of Megatron-Core
    instead."""
    for name in RUNS:
        engines.update(name, ENGINE)
    called = {
        name.removeprefix("transformer_engine.pytorch.").removesuffix(".__init__")
        for names in engines.called.values()
        for name in names
    }
    assert called >= CALLED, CALLED - called
