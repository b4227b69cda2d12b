"""The verify command on real ranks."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from gspo_megatron.checkpoint.convert import hf_to_megatron, megatron_to_hf
from tests.e2e.conftest import write_config
from tests.e2e.resuming import all_records, make_small, train
from tests.programs import gspo


def verify(
    config: Path, *words: object, code: int = 0, is_new: bool = False
) -> tuple[str, dict[str, float]]:
    """Run the command. Returns its output, and the name=value pairs of the last line."""
    said = gspo("verify", config, *words, expect=code, is_new=is_new).stdout
    pairs = (pair.split("=") for pair in said.strip().splitlines()[-1].split())
    return said, {name: float(value) for name, value in pairs}


def test_layouts_that_agree_pass_and_the_worst_parameter_is_named(config_file: Path) -> None:
    said, found = verify(config_file, "--layouts", "tp=2", "dp=2,ep=2")
    assert (found["layouts"], found["equal"]) == (2, 1)
    assert 0 < found["worst_error"] < 2e-5
    lines = said.splitlines()
    assert lines[2] == (
        "One update of the policy on each layout, compared with the same update on tp=1 (1 rank). "
        "All errors are relative differences; up to 0.0002 counts as equal, because sums in "
        "another order round differently."
    )
    heads = [re.split(" {2,}", line.strip()) for line in lines[4:6]]
    assert heads == [
        ["loss", "grad norm", "largest error"],
        ["layout", "ranks", "error", "error", "of a gradient"],
    ]
    worst = r"tp=2: the gradient with the largest error is that of decoder\.layers\.[\w.]+"
    assert any(re.fullmatch(worst, line) for line in lines)
    assert lines[-2] == "for scripts:"


def test_in_float64_only_the_order_of_sums_differs(config_file: Path) -> None:
    """The routers' own losses are off, because Megatron-Core computes them in float32. With a
    tolerance of 0 the exit code is 1, because two layouts never agree to the last bit."""
    settings = ("training.packing=false", "model.megatron.moe_aux_loss_coeff=0.0")
    words = ("--layouts", "cp=2", "--precision", "fp64", "--tolerance", "1e-30")
    said, found = verify(config_file, *settings, *words, code=1, is_new=True)
    assert found["worst_error"] < 1e-7
    assert found["equal"] == 0 and "DIFFERS" in said


def test_a_layout_that_the_model_does_not_fit_is_refused(config_file: Path) -> None:
    assert "layout pp=3" in gspo("verify", config_file, "--layouts", "pp=3", expect=2).stderr


@pytest.fixture(scope="module")
def kept_run(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a run on two pipeline stages. The inputs of the last 2 of its 3 steps
    are kept, with the rollout's routes. The run has a reference policy, an optimizer with a
    warm-up, and two mini-batches in a step."""
    folder = tmp_path_factory.mktemp("kept")
    path = write_config(toy, folder)
    make_small(
        path,
        parallel={"layout": "pp=2"},
        objective={"name": "grpo", "kl": "k3", "kl_coefficient": 0.1},
        routing={"replay": "r3", "reference_replay": "r2"},
        training={"steps": 3, "keep_step_inputs": 2},
    )
    train(path)
    return path


def verify_step(
    config: Path, *layouts: object, overrides: tuple[str, ...] = (), step: int = 3
) -> tuple[str, dict[str, float]]:
    return verify(config, *overrides, "--step", step, "--layouts", *layouts)


def test_a_kept_step_has_the_logged_loss_on_every_layout(kept_run: Path) -> None:
    run = kept_run.parent / "run"
    kept = sorted(p.name for p in (run / "rollouts").iterdir())
    assert kept == ["step_00000002", "step_00000003"]
    losses = {record["step"]: record.get("loss") for record in all_records(run, "rl")}
    said, found = verify_step(kept_run, "tp=2", "dp=2")
    assert "rl_00000002, with its optimizer" in said
    assert (found["layouts"], found["equal"], found["step"]) == (2, 1, 3)
    assert 0 < found["worst_error"] < 2e-5
    assert found["logged_loss"] == pytest.approx(losses[3], rel=1e-8)
    # Advantages have size 1. The loss is a mean of hundreds of such terms in fp32.
    assert found["loss"] == pytest.approx(found["logged_loss"], abs=1e-6)
    # With other weights, or with the inputs of another step, the losses would differ more.
    assert abs(found["loss"] - losses[2]) > 1e-5


@pytest.mark.full
def test_without_the_steps_own_weights_it_says_so(kept_run: Path) -> None:
    older = kept_run.parent / "run" / "checkpoints" / "rl_00000001"
    said, found = verify_step(kept_run, "tp=2", "--checkpoint", older)
    assert "rl_00000001, not those that the step began with" in said
    assert "all mini-batches use these weights: the loss is not that of the run" in said
    assert abs(found["loss"] - found["logged_loss"]) > 1e-6


def test_a_step_that_ends_a_run_is_compared(kept_run: Path) -> None:
    """With this large learning rate, the gradient of the second mini-batch is not finite on any
    layout."""
    overrides = ("optimizer.learning_rate=1e30", "objective.kl_in=reward")
    said, found = verify_step(kept_run, "tp=2", overrides=overrides)
    assert "tp=2: the step ends in mini-batch 2 (the reference's: 2)" in said
    assert "in the same places as the reference: loss; the errors" in said
    assert (found["equal"], found["step"]) == (1, 3) and math.isnan(found["loss"])
    assert 0 < found["worst_error"] < 2e-5


@pytest.mark.full
def test_gradients_that_are_not_finite_are_compared(kept_run: Path, tmp_path: Path) -> None:
    """One weight of one expert is NaN, so some gradients are NaN. The layout does not change which
    gradients are NaN."""
    megatron_to_hf(kept_run.parent / "run", tmp_path / "hf")
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.1.mlp.experts.1.down_proj.weight"][3, 4] = math.nan
    save_file(tensors, file, metadata={"format": "pt"})
    hf_to_megatron(tmp_path / "hf", tmp_path / "lost")
    plain = ("objective.kl=none", "objective.kl_coefficient=", "routing.reference_replay=off")
    words = ("tp=2", "dp=2", "--checkpoint", tmp_path / "lost")
    said, found = verify_step(kept_run, *words, overrides=plain)
    assert said.count("not finite, in the same places as the reference: loss, grad norm, ") == 2
    assert found["equal"] == 1


@pytest.mark.full
def test_a_step_in_bf16_is_computed_with_the_fp32_weights_behind_it(
    toy: Path, tmp_path: Path
) -> None:
    """The optimizer keeps each fp32 weight on one data rank. All ranks need to get all of these
    weights."""
    path = make_small(
        write_config(toy, tmp_path), training={"precision": "bf16", "keep_step_inputs": 1}
    )
    train(path)
    said, found = verify_step(path, "dp=2", "ep=2,dp=2", step=2)
    assert "the run computed in bf16: its loss differs by rounding" in said
    # bf16 has 8 bits, and advantages have size 1.
    assert found["loss"] == pytest.approx(found["logged_loss"], abs=2e-3)
    assert found["loss"] != found["logged_loss"]
