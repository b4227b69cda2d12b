"""The stand-in for Transformer Engine on the rehearsed device. Its names and parameters fit the
recorded signatures of the real package."""

from __future__ import annotations

import ast
import inspect

import pytest

from tests.cuda_rehearsal.engine.contract import demands
from tests.cuda_rehearsal.engine.implementations import IMPLEMENTATIONS
from tests.cuda_rehearsal.engine.tables import SITE, TABLES, Table, signature_of, versions

# Fields that TEDotProductAttention removes before it calls Transformer Engine, in every version.
NOT_PASSED_ON = {"cp_group", "local_cp_size", "total_tokens", "seq_idx", "tokens_per_sample"}


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


def test_the_contract_names_arguments_of_the_tables() -> None:
    """Each requirement is about the module itself, or about an argument that the function has in
    all named versions."""
    for name, found in demands().items():
        for demand in found:
            assert set(demand["where"]) <= set(TABLES)
            for version in demand["where"]:
                text = Table(version).names.get(f"transformer_engine.{name}", "value")
                if text is not None and text.startswith("("):
                    known = signature_of(text).parameters.keys() | {"self"}
                    assert demand["argument"].partition(".")[0] in known, (name, demand)


def own_parameters(path: str) -> set[str]:
    """The parameters of the stand-in's function of this name, or an empty set if the stand-in lacks
    the function."""
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
    """No caller could ever pass a parameter that only the stand-in has."""
    compared = 0
    for path, text in Table(version).names.items():
        if text is not None and text.startswith("("):
            known = signature_of(text).parameters
            if not any(p.kind is p.VAR_KEYWORD for p in known.values()):
                assert own_parameters(path) <= known.keys(), path
                compared += bool(own_parameters(path))
    assert compared > 20
