"""A reward model beside the trained model: the rules for its keys, and the configuration of a model
in a folder."""

from __future__ import annotations

import re
from typing import TypeVar

from gspo_megatron.config.model_rules import MODEL_RULES, Plan, Problems, experts_divide
from gspo_megatron.config.objectives import learns_from_parts
from gspo_megatron.config.precision import base_precision
from gspo_megatron.config.reward_model import reward_model_problems
from gspo_megatron.config.schema import ModelSection, RunConfig
from gspo_megatron.errors import ConfigError, problem
from gspo_megatron.families.model_shape import ModelPreset

C = TypeVar("C", bound=RunConfig)


def preset_of_scorer(folder: str) -> ModelPreset:
    """Return the model of a *ForSequenceClassification folder. Raises ConfigError if the folder
    cannot be read, or holds no such model."""
    preset = ModelSection(hf_path=folder).starting_shape()
    if not preset.scores:
        wrong = (
            "holds no preference model; allowed: a folder that ends in ForSequenceClassification"
        )
        raise ConfigError([problem("architectures", folder, wrong)])
    return preset


def config_of_scorer(config: C, folder: str) -> C:
    """Return the run's configuration with the frozen model of `folder` in place of the trained one.
    The frozen model computes in the precision of the run, or in bf16 if the run uses FP8."""
    preset_of_scorer(folder)
    given, training = config.model, config.training
    model = ModelSection(
        hf_path=folder,
        backend=given.backend,
        ignore_custom_code=given.ignore_custom_code,
    )
    training = training.model_copy(
        update={"precision": base_precision(training.precision), "recompute": "none"}
    )
    return config.model_copy(update={"model": model, "training": training})


def scorer_problems(config: RunConfig, folder: str, world_size: int) -> list[str]:
    """Return the problems of a preference model on the layout of the run, one line each. The folder
    may be unusable, or a size of the model may not be a multiple of a size of the layout."""
    try:
        own = config_of_scorer(config, folder)
        plan = Plan(own, world_size, for_training=False)
        experts = plan.shape.num_moe_experts is not None
        rules = [rule for rule in MODEL_RULES if experts or rule is not experts_divide]
        problems = [(key, plan.value(key), wrong) for rule in rules for key, wrong in rule(plan)]
    except ConfigError as error:
        return error.problems
    what = f"the model in {folder}"
    return [problem(key, value, f"{what}: {wrong}") for key, value, wrong in problems]


def reward_model_fits(plan: Plan) -> Problems:
    """Check that a reward model can score the run's responses."""
    config = plan.config
    for key, wrong in reward_model_problems(config.reward):
        yield f"reward.{key}", wrong
    if not config.reward.model.is_on:
        return
    if config.environment.has_episodes:
        source = "url" if config.reward.model.url is not None else "folder"
        wrong = "a reward model scores a prompt and one response, not an environment's episodes"
        yield f"reward.model.{source}", f"{wrong}; allowed: null"
    if learns_from_parts(config.objective) and config.reward.model.normalize != "none":
        wrong = "objective.advantage = gdpo normalises each part of the reward by itself"
        yield "reward.model.normalize", f"{wrong}; allowed: none"


def reward_model_divides(plan: Plan) -> Problems:
    """Check the folder of a reward model, and that the layout divides the model."""
    folder = plan.config.reward.model.folder
    lines = [] if folder is None else scorer_problems(plan.config, folder, plan.world_size)
    if lines:
        named = r"^(model\.hf_path|architectures)"
        raise ConfigError([re.sub(named, "reward.model.folder", each) for each in lines])
    yield from ()
