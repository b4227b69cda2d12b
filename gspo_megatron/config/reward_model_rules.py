"""Rules that the keys of a reward model must satisfy with the rest of a run."""

from __future__ import annotations

import re

from gspo_megatron.config.model_rules import Plan, Problems
from gspo_megatron.config.objectives import learns_from_parts
from gspo_megatron.config.reward_model import reward_model_problems
from gspo_megatron.config.scorer import scorer_problems
from gspo_megatron.errors import ConfigError


def reward_model_fits(plan: Plan) -> Problems:
    """Check that a reward model can score the run's responses."""
    config = plan.config
    for key, _, wrong in reward_model_problems(config.reward):
        yield f"reward.{key}", wrong
    if not config.reward.model.is_on:
        return
    if config.environment.has_episodes:
        wrong = "a reward model scores a prompt and one response, not an environment's episodes"
        yield f"reward.model.{_source(plan)}", f"{wrong}; allowed: null"
    if learns_from_parts(config.objective) and config.reward.model.normalize != "none":
        wrong = "objective.advantage = gdpo normalises each part of the reward by itself"
        yield "reward.model.normalize", f"{wrong}; allowed: none"


def reward_model_divides(plan: Plan) -> Problems:
    """Check the folder of a reward model, and that the layout divides the model."""
    folder = plan.config.reward.model.folder
    lines = [] if folder is None else scorer_problems(plan.config, folder, plan.world_size)
    if lines:
        raise ConfigError(
            [re.sub(r"^(model\.hf_path|architectures)", _KEY, each) for each in lines]
        )
    yield from ()


_KEY = "reward.model.folder"


def _source(plan: Plan) -> str:
    return "url" if plan.config.reward.model.url is not None else "folder"
