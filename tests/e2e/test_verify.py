"""The verify command on real ranks."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from gspo_megatron.checkpoint.hf.convert import hf_to_megatron, megatron_to_hf
from tests.e2e.conftest import Command, write_config
from tests.e2e.resuming import flip_a_bit, make_small, train


def figures(stdout: str) -> dict[str, float]:
    """The name=value pairs of the last line."""
    pairs = (pair.split("=") for pair in stdout.strip().splitlines()[-1].split())
    return {name: float(value) for name, value in pairs}


def test_layouts_that_agree_pass_and_the_worst_parameter_is_named(
    gspo: Command, config_file: Path
) -> None:
    result = gspo("verify", config_file, "--layouts", "tp=2", "dp=2,ep=2", expect=0)
    found = figures(result.stdout)
    assert (found["layouts"], found["equal"]) == (2, 1)
    assert 0 < found["worst_error"] < 2e-5
    assert "decoder.layers." in result.stdout


def test_in_float64_only_the_order_of_sums_differs(gspo: Command, config_file: Path) -> None:
    """The routers' own losses off, which Megatron-Core computes in float32."""
    settings = ("training.packing=false", "model.megatron.moe_aux_loss_coeff=0.0")
    result = gspo(
        "verify", config_file, *settings, "--layouts", "cp=2", "--precision", "fp64", expect=0
    )
    assert figures(result.stdout)["worst_error"] < 1e-7


def test_beyond_the_tolerance_the_exit_code_is_1(gspo: Command, config_file: Path) -> None:
    """No two layouts agree to 1e-12 in fp32."""
    result = gspo("verify", config_file, "--layouts", "tp=2", "--tolerance", "1e-12", expect=1)
    assert figures(result.stdout)["equal"] == 0
    assert "DIFFERS" in result.stdout


def test_a_layout_that_the_model_does_not_fit_is_refused(gspo: Command, config_file: Path) -> None:
    result = gspo("verify", config_file, "--layouts", "pp=3", expect=2)
    assert "layout pp=3" in result.stderr


@pytest.fixture(scope="module")
def dumped_run(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a run of 3 steps on two pipeline stages, of which the last 2 are dumped:
    with the rollout's routes, a reference policy, and an optimizer that has gone through a warm
    start and two mini-batches a step."""
    folder = tmp_path_factory.mktemp("dumped")
    path = write_config(toy, folder)
    make_small(
        path,
        parallel={"layout": "pp=2"},
        objective={"name": "grpo", "kl": "k3", "kl_coefficient": 0.1},
        routing={"replay": "r3", "reference_replay": "r2"},
        training={"steps": 3, "dump_batches": 2},
    )
    train(path)
    return path


def logged(run: Path, step: int) -> float:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    (found,) = (r["loss"] for r in records if (r["phase"], r["step"]) == ("rl", step))
    return found


def test_a_dumped_step_has_the_logged_loss_on_every_layout(gspo: Command, dumped_run: Path) -> None:
    run = dumped_run.parent / "run"
    assert sorted(p.name for p in (run / "dumps").iterdir()) == ["step_00000002", "step_00000003"]
    dump = run / "dumps" / "step_00000003"
    result = gspo("verify", dumped_run, "--from-dump", dump, "--layouts", "tp=2", "dp=2", expect=0)
    assert "rl_00000002, with its optimizer" in result.stdout
    found = figures(result.stdout)
    assert (found["layouts"], found["equal"], found["step"]) == (2, 1, 3)
    assert 0 < found["worst_error"] < 2e-5
    assert found["logged_loss"] == pytest.approx(logged(run, 3), rel=1e-8)
    # Advantages are of size 1, and the loss is a mean of hundreds of such terms in fp32.
    assert found["loss"] == pytest.approx(found["logged_loss"], abs=1e-6)
    # Other weights or another step's inputs would show.
    assert abs(found["loss"] - logged(run, 2)) > 1e-5


@pytest.mark.full
def test_without_the_steps_own_weights_it_says_so(gspo: Command, dumped_run: Path) -> None:
    run = dumped_run.parent / "run"
    older = run / "checkpoints" / "rl_00000001"
    dump = run / "dumps" / "step_00000003"
    words = ("--from-dump", dump, "--checkpoint", older, "--layouts", "tp=2")
    result = gspo("verify", dumped_run, *words, expect=0)
    assert "rl_00000001, not those that the step began with" in result.stdout
    assert "all mini-batches use these weights: the loss is not that of the run" in result.stdout
    found = figures(result.stdout)
    assert abs(found["loss"] - found["logged_loss"]) > 1e-6


def test_a_damaged_dump_is_named(gspo: Command, dumped_run: Path, tmp_path: Path) -> None:
    dump = tmp_path / "step_00000002"
    shutil.copytree(dumped_run.parent / "run" / "dumps" / "step_00000002", dump)
    [file, *_] = sorted((dump / "rollouts").iterdir())
    flip_a_bit(file)
    result = gspo("verify", dumped_run, "--from-dump", dump, "--layouts", "tp=2", expect=2)
    assert f"{dump}: rollouts/{file.name}: altered" in result.stderr


def test_a_damaged_reference_is_named(gspo: Command, dumped_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(dumped_run.parent / "run", run)
    flip_a_bit(run / "checkpoints" / "reference" / "model" / "__0_0.distcp")
    dump = run / "dumps" / "step_00000003"
    result = gspo("verify", dumped_run, "--from-dump", dump, "--layouts", "tp=2", expect=2)
    assert f"{run / 'checkpoints' / 'reference'}: model/__0_0.distcp: altered" in result.stderr


def test_a_step_that_ends_a_run_is_compared(gspo: Command, dumped_run: Path) -> None:
    """With so large a rate the second mini-batch has no finite gradient, on any layout."""
    dump = dumped_run.parent / "run" / "dumps" / "step_00000003"
    words = ("optimizer.learning_rate=1e30", "--from-dump", dump, "--layouts", "tp=2")
    result = gspo("verify", dumped_run, *words, expect=0)
    assert "tp=2: the step ends in mini-batch 2 (the reference's: 2)" in result.stdout
    assert "in the same places as the reference: loss; the errors" in result.stdout
    found = figures(result.stdout)
    assert (found["equal"], found["step"]) == (1, 3) and math.isnan(found["loss"])
    assert 0 < found["worst_error"] < 2e-5


@pytest.mark.full
def test_gradients_that_are_not_finite_are_compared(
    gspo: Command, dumped_run: Path, tmp_path: Path
) -> None:
    """One weight of one expert is no number, and with it no gradient is; which elements are lost
    depends on no layout."""
    megatron_to_hf(dumped_run.parent / "run", tmp_path / "hf")
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.1.mlp.experts.1.down_proj.weight"][3, 4] = math.nan
    save_file(tensors, file, metadata={"format": "pt"})
    hf_to_megatron(tmp_path / "hf", tmp_path / "lost")
    dump = dumped_run.parent / "run" / "dumps" / "step_00000003"
    words = ("objective.kl=none", "objective.kl_coefficient=", "routing.reference_replay=off")
    words += ("--from-dump", dump, "--checkpoint", tmp_path / "lost", "--layouts", "tp=2", "dp=2")
    result = gspo("verify", dumped_run, *words, expect=0)
    same = "not finite, in the same places as the reference: loss, grad norm, "
    assert result.stdout.count(same) == 2
    assert figures(result.stdout)["equal"] == 1


@pytest.mark.full
def test_a_step_in_bf16_is_computed_with_the_fp32_weights_behind_it(
    gspo: Command, toy: Path, tmp_path: Path
) -> None:
    """They lie with the optimizer, each on one data rank: all have to get them."""
    path = make_small(
        write_config(toy, tmp_path), training={"precision": "bf16", "dump_batches": 1}
    )
    train(path)
    dump = tmp_path / "run" / "dumps" / "step_00000002"
    result = gspo("verify", path, "--from-dump", dump, "--layouts", "dp=2", "ep=2,dp=2", expect=0)
    assert "the run computed in bf16: its loss differs by rounding" in result.stdout
    found = figures(result.stdout)
    # bf16 has 8 bits; advantages are of size 1
    assert found["loss"] == pytest.approx(found["logged_loss"], abs=2e-3)
    assert found["loss"] != found["logged_loss"]
