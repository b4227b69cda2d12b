"""The calls into Transformer Engine, which no machine of the tests can import, fit its signatures.

The tables in `transformer_engine` are made by tools/te_signatures.py.
"""

from __future__ import annotations

import ast
import inspect
import json
import shutil
from pathlib import Path

import pytest

from tests.cuda_rehearsal.engine.contract import demands
from tests.cuda_rehearsal.engine.implementations import IMPLEMENTATIONS
from tests.cuda_rehearsal.engine.tables import SITE, TABLES, Table, versions
from tests.programs import ROOT
from tools.te_calls import Found, check_calls, signature_of
from tools.te_contract import hash_of, misplaced
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


def test_the_contract_names_arguments_of_the_tables() -> None:
    """A demand is about an argument that each of its versions has, or about the module itself."""
    for name, found in demands().items():
        for demand in found:
            assert set(demand["where"]) <= set(TABLES)
            for version in demand["where"]:
                text = Table(version).names.get(f"transformer_engine.{name}", "value")
                if text is not None and text.startswith("("):
                    known = signature_of(text).parameters.keys() | {"self"}
                    assert demand["argument"].partition(".")[0] in known, (name, demand)


def own_parameters(path: str) -> set[str]:
    """Of what stands in for this name of a table; none if nothing does."""
    owner, _, member = path.removeprefix("transformer_engine.").rpartition(".")
    if owner in IMPLEMENTATIONS:
        function = vars(IMPLEMENTATIONS[owner]).get(member)
    else:
        function = IMPLEMENTATIONS.get(f"{owner}.{member}")
        function = vars(function).get("__init__") if isinstance(function, type) else function
    if function is None:
        return set()
    own = inspect.signature(getattr(function, "__func__", function)).parameters.values()
    return {p.name for p in own if p.kind is not p.VAR_KEYWORD} - {"self"}


@pytest.mark.parametrize("version", versions())
def test_the_stand_in_has_no_parameter_that_the_table_lacks(version: str) -> None:
    """Else it would compute with what no caller can give."""
    compared = 0
    for path, text in Table(version).names.items():
        if text is not None and text.startswith("("):
            known = signature_of(text).parameters
            if not any(p.kind is p.VAR_KEYWORD for p in known.values()):
                assert own_parameters(path) <= known.keys(), path
                compared += bool(own_parameters(path))
    assert compared > 20


def test_a_place_that_has_moved_is_named(tmp_path: Path) -> None:
    line = "    assert tokens.dtype == int32"
    (tmp_path / "layer.py").write_text(f"def forward(tokens):\n\n{line}\n")
    demand = {
        "argument": "tokens",
        "demand": "int32",
        "where": {"1.0": f"layer.py:3 {hash_of(line)}"},
    }
    contract = tmp_path / "contract.json"
    contract.write_text(json.dumps({"forward": [demand]}))
    assert list(misplaced(contract, "1.0", [tmp_path])) == []
    demand["where"] = {"1.0": f"layer.py:2 {hash_of(line)}"}
    contract.write_text(json.dumps({"forward": [demand]}))
    assert list(misplaced(contract, "1.0", [tmp_path])) == [
        "forward: int32: layer.py:2, found at [3]"
    ]
    (tmp_path / "layer.py").write_text("")
    [told] = misplaced(contract, "1.0", [tmp_path])
    assert "found at none" in told
