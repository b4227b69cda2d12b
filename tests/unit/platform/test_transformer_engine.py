"""The calls into Transformer Engine, which no machine of the tests can import, fit its signatures.

The tables in `transformer_engine` are made by tools/te_signatures.py.
"""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from tests.cuda_rehearsal.engine.tables import SITE, Table, versions
from tests.programs import ROOT
from tools.te_calls import Found, check_calls, signature_of
from tools.te_signatures import files_of

WRAPPERS = "megatron/core/extensions/transformer_engine.py"
# Of the dispatcher moe_flex_dispatcher_backend = ncclep, which no run of ours has: 0.19.2 does not
# pass `num_topk`, which 2.20.2 wants.
KNOWN = ("transformer_engine.pytorch.ep.ep_bootstrap",)
# What specifications of ours use, at least.
NEEDED = {
    "DotProductAttention.__init__",
    "DotProductAttention.forward",
    "GroupedLinear.__init__",
    "GroupedLinear.forward",
    "LayerNormLinear.__init__",
    "LayerNormLinear.forward",
    "Linear.__init__",
    "Linear.forward",
    "RMSNorm",
    "attention.rope.apply_rotary_pos_emb",
    "distributed.checkpoint",
    "fp8_autocast",
    "optimizers.FusedAdam",
    "permutation.moe_permute",
    "permutation.moe_unpermute",
}
# Fields that TEDotProductAttention takes out, whatever the version of Transformer Engine.
NOT_PASSED_ON = {"cp_group", "local_cp_size", "total_tokens", "seq_idx", "tokens_per_sample"}


def check(root: Path, version: str) -> Found:
    return check_calls(root, files_of(root), version, Table(version))


@pytest.mark.parametrize("version", versions())
def test_calls_of_megatron_core_fit(version: str) -> None:
    found = check(SITE, version)
    assert [text for text in found.problems if not any(name in text for name in KNOWN)] == []
    assert {f"transformer_engine.pytorch.{name}" for name in NEEDED} <= found.names
    print(f"{found.calls} calls of {len(found.names)} names")


@pytest.mark.parametrize("version", versions())
def test_calls_of_the_package_fit(version: str) -> None:
    found = check(ROOT, version)
    assert found.problems == []
    assert found.names == {"transformer_engine.pytorch.distributed.checkpoint"}


@pytest.mark.parametrize("version", versions())
def test_attention_takes_the_fields_of_packed_sequences(version: str) -> None:
    text = Table(version)("transformer_engine.pytorch.DotProductAttention.forward")
    tree = ast.parse((SITE / "megatron/core/packed_seq_params.py").read_text())
    fields = {ast.unparse(n.target) for n in ast.walk(tree) if isinstance(n, ast.AnnAssign)}
    assert text is not None
    assert (
        {"cu_seqlens_q", "max_seqlen_kv"}
        < fields - NOT_PASSED_ON
        <= signature_of(text).parameters.keys()
    )


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("fuse_wgrad_accumulation=", "fuse_gradients=", "argument 'fuse_gradients'"),
        ('extra_kwargs["ub_name"]', 'extra_kwargs["ub_label"]', "argument 'ub_label'"),
        (
            'extra_transformer_engine_kwargs["device"]',
            'extra_transformer_engine_kwargs["gpu"]',
            "'gpu'",
        ),
        ("logits, labels, 0.0, False,", "logits, labels, 0.0, False, 1, 2, 3, 4,", "too many"),
        ("in_features=input_size,", "", "missing a required argument: 'in_features'"),
        ("pytorch.distributed import", "pytorch.gone import", "there is no transformer_engine"),
    ],
)
def test_a_call_that_does_not_fit_is_found(
    tmp_path: Path, old: str, new: str, problem: str
) -> None:
    path = tmp_path / WRAPPERS
    path.parent.mkdir(parents=True)
    shutil.copyfile(SITE / WRAPPERS, path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    version = versions()[-1]
    look = Table(version)
    found = check_calls(tmp_path, [path], version, lambda n: None if ".gone" in n else look(n))
    assert found.problems
    assert all(problem in each for each in found.problems), found.problems
