"""Bugs put in by patches, and the checks that have to notice them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch

from gspo_megatron.config.objectives import objective_problems
from gspo_megatron.config.schema import ObjectiveSection
from gspo_megatron.types import LossInputs
from tests.unit.objectives.papers import expect

Check = Callable[[], bool]


def agrees(name: str, objective: Any, inputs: LossInputs, **expected_with: Any) -> bool:
    """Whether loss and gradient are those of the paper's loops."""
    inputs.logprobs.grad = None
    outputs = objective(inputs)
    outputs.loss.backward()
    expected = expect(name, inputs, **expected_with)
    near = partial(torch.allclose, rtol=1e-9, atol=1e-12)
    return near(outputs.loss, expected.loss) and near(inputs.logprobs.grad, expected.gradient)


def notices(check: Check, target: Any, attribute: str, bug: Any) -> None:
    """`check` holds, and fails with `bug` in the place of `target.attribute`."""
    assert check()
    with mock.patch.object(target, attribute, bug):
        assert not check(), "the bug goes unnoticed"
    assert check()


def problems(**keys: Any) -> list[str]:
    """What a configuration with these keys is answered."""
    return list(objective_problems(ObjectiveSection(**keys)))
