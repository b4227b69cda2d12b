"""The preflight command on real ranks."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.conftest import Command


def figures(stdout: str) -> dict[str, float]:
    """The name=value pairs of the last line."""
    pairs = (pair.split("=") for pair in stdout.strip().splitlines()[-1].split())
    return {name: float(value) for name, value in pairs}


def test_layouts_that_agree_pass_and_the_worst_parameter_is_named(
    gspo: Command, config_file: Path
) -> None:
    result = gspo("verify", config_file, "--layouts", "tp=2", "dp=2,ep=2")
    assert result.returncode == 0, result.stderr[-3000:]
    found = figures(result.stdout)
    assert (found["layouts"], found["equal"]) == (2, 1)
    assert 0 < found["worst_error"] < 2e-5
    assert "decoder.layers." in result.stdout


def test_in_float64_only_the_order_of_sums_differs(gspo: Command, config_file: Path) -> None:
    """The routers' own losses off, which Megatron-Core computes in float32."""
    settings = ("training.packing=false", "model.megatron.moe_aux_loss_coeff=0.0")
    result = gspo("verify", config_file, *settings, "--layouts", "cp=2", "--precision", "fp64")
    assert result.returncode == 0, result.stderr[-3000:]
    assert figures(result.stdout)["worst_error"] < 1e-7


def test_beyond_the_tolerance_the_exit_code_is_1(gspo: Command, config_file: Path) -> None:
    """No two layouts agree to 1e-12 in fp32."""
    result = gspo("verify", config_file, "--layouts", "tp=2", "--tolerance", "1e-12")
    assert result.returncode == 1, result.stderr[-3000:]
    assert figures(result.stdout)["equal"] == 0
    assert "DIFFERS" in result.stdout


def test_a_layout_that_the_model_does_not_fit_is_refused(gspo: Command, config_file: Path) -> None:
    result = gspo("verify", config_file, "--layouts", "pp=3")
    assert result.returncode == 2
    assert "layout pp=3" in result.stderr
    assert "Traceback" not in result.stderr
