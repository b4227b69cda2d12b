"""Custom objectives and advantages from a user's module."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gspo_megatron.config.schema import ObjectiveSection
from gspo_megatron.errors import ConfigError, UserError
from gspo_megatron.objectives import build_objective
from gspo_megatron.rl.distillation import add_to_advantages
from tests.unit.objectives.batches import make_inputs

NAME = "my_losses"
SOURCE = """
import torch

from gspo_megatron.objectives.metrics import pair
from gspo_megatron.types import LossInputs, LossOutputs

NUMBER = 3


def reinforce(inputs: LossInputs, scale: float = 1.0, *, label: str = "") -> LossOutputs:
    advantages = inputs.advantages[inputs.sequence_index]
    terms = -scale * inputs.mask * advantages * inputs.logprobs
    loss = terms.sum() / inputs.global_num_sequences
    return LossOutputs(loss, {"loss": pair(terms.sum(), len(inputs.advantages))}, {})


def with_reference(inputs):
    return reinforce(inputs)


with_reference.needs_reference = True
with_reference.needs_entropy_gradient = True


def without_reference(inputs):
    return reinforce(inputs)


without_reference.needs_reference = False


def returns_a_tensor(inputs):
    return inputs.logprobs.sum()


def returns_a_vector(inputs):
    return LossOutputs(inputs.logprobs, {}, {})


def returns_a_number(inputs):
    return LossOutputs(0.5, {}, {})


def returns_a_mean(inputs):
    return LossOutputs(inputs.logprobs.sum(), {"mine": inputs.mask.mean()}, {})


def exits(*arguments):
    raise SystemExit(0)


def no_inputs():
    pass


ranks = lambda rewards, group_index: rewards.argsort().argsort().double()
columns = lambda rewards, group_index: rewards[:, None]
a_list = lambda rewards, group_index: rewards.tolist()
not_finite = lambda rewards, group_index: rewards / 0
one_argument = lambda rewards: rewards
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Write a module into the current directory, which is not on Python's search path."""
    (tmp_path / f"{NAME}.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop(NAME, None)


def build(function: str, **keys):
    section = ObjectiveSection(import_path=f"{NAME}:{function}", **keys)
    return build_objective(section, max_response_tokens=40)


def build_advantages(function: str):
    section = ObjectiveSection(advantage_import_path=f"{NAME}:{function}")
    return build_objective(section, max_response_tokens=40).advantages.of_sequences


@pytest.mark.parametrize(("options", "scale"), [({}, 1.0), ({"scale": 3.0}, 3.0)])
def test_a_custom_objective_gets_its_options_or_has_its_defaults(options, scale):
    inputs = make_inputs(0)
    objective = build("reinforce", options=options)
    objective(inputs).loss.backward()
    advantages = inputs.advantages[inputs.sequence_index]
    expected = -scale * advantages * inputs.mask / inputs.global_num_sequences
    torch.testing.assert_close(inputs.logprobs.grad, expected)
    assert objective.name == f"{NAME}:reinforce"
    assert objective.complete({"loss": 1.0}) == {"loss": 1.0}


@pytest.mark.parametrize(
    ("function", "options", "line"),
    [
        (
            "reinforce",
            {"scael": 1.0},
            ".options.scael = 1.0: my_losses:reinforce has no such option; allowed: scale, label",
        ),
        (
            "no_inputs",
            {},
            " my_losses:no_inputs: the function takes no inputs as its first argument",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused_in_one_line(function, options, line):
    with pytest.raises(ConfigError) as error:
        build(function, options=options)
    assert error.value.problems == [f"objective{line}"]


@pytest.mark.parametrize("key", ["import_path", "advantage_import_path"])
@pytest.mark.parametrize(
    ("path", "message"),
    [
        (f"{NAME}:reinforc", "has no function reinforc; it has: reinforce"),
        (f"{NAME}:NUMBER", "has no function NUMBER"),
        ("no_such_module_of_mine:loss", "no module named no_such_module_of_mine"),
    ],
)
def test_a_function_that_is_not_there_is_named_with_its_key(key, path, message):
    section = ObjectiveSection(**{key: path})
    with pytest.raises(UserError, match=message) as error:
        build_objective(section, max_response_tokens=40)
    assert str(error.value).startswith(f"objective.{key} = {path}: ")


def test_a_function_says_what_it_needs():
    for function, needs in (("reinforce", False), ("with_reference", True)):
        objective = build(function)
        assert objective.needs_reference == objective.needs_entropy_gradient == needs


@pytest.mark.parametrize("function", ["reinforce", "without_reference"])
def test_a_divergence_in_the_reward_needs_the_reference_whatever_the_function_says(function):
    assert build(function, kl="k3", kl_coefficient=0.1, kl_in="reward").needs_reference


def test_a_result_that_is_no_loss_is_refused():
    with pytest.raises(UserError, match="returns_a_tensor: returned Tensor, not LossOutputs"):
        build("returns_a_tensor")(make_inputs(0))
    with pytest.raises(UserError, match=r"the loss has shape \(36,\); allowed: a scalar"):
        build("returns_a_vector")(make_inputs(0))
    with pytest.raises(UserError, match="the loss is a float; allowed: a scalar"):
        build("returns_a_number")(make_inputs(0))
    with pytest.raises(
        UserError, match=r"means\['mine'\] has shape \(\); allowed: what objectives"
    ):
        build("returns_a_mean")(make_inputs(0))
    with pytest.raises(UserError, match=r"my_losses:exits: ended with SystemExit\(0\) \(my_losses"):
        build("exits")(make_inputs(0))


def test_a_custom_advantage():
    found = build_advantages("ranks")(torch.tensor([0.3, 0.1, 0.9]), torch.zeros(3).long())
    assert found.tolist() == [1, 0, 2]
    assert found.dtype == torch.float32


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("columns", r"returned \(2, 1\), not a tensor of shape \(2,\)"),
        ("a_list", r"returned list, not a tensor of shape \(2,\)"),
        ("not_finite", "returned numbers that are not finite"),
        ("exits", r"ended with SystemExit\(0\) \(my_losses.py:"),
    ],
)
def test_advantages_that_would_do_harm_later_are_refused_at_once(function, message):
    with pytest.raises(UserError, match=message) as error:
        build_advantages(function)(torch.tensor([0.5, 1.0]), torch.zeros(2).long())
    assert str(error.value).startswith(f"objective.advantage_import_path = {NAME}:{function}: ")


def test_an_advantage_with_other_arguments_is_refused_before_training():
    with pytest.raises(ConfigError, match="has to take two arguments, rewards and group_index"):
        build_advantages("one_argument")


def test_a_teacher_reaches_a_function_that_reads_advantages_of_sequences_or_of_tokens():
    inputs, objective = make_inputs(0), build("reinforce")
    teacher = inputs.old_logprobs + torch.linspace(-1, 2, len(inputs.mask))
    taught = add_to_advantages(inputs, teacher, objective, 0.5)
    said = 0.5 * (teacher - inputs.old_logprobs)
    for i, advantage in enumerate(inputs.advantages):
        own = (inputs.sequence_index == i) & (inputs.mask > 0)
        torch.testing.assert_close(taught.advantages[i], advantage + said[own].mean())
        torch.testing.assert_close(taught.token_advantages[own], advantage + said[own])
    objective(taught).loss.backward()
    expected = -taught.advantages[inputs.sequence_index] * inputs.mask / inputs.global_num_sequences
    torch.testing.assert_close(inputs.logprobs.grad, expected)
