"""Rules that several keys of the configuration of a preference model must satisfy together."""

from __future__ import annotations

from gspo_megatron.config.model_rules import Plan, Problems, unread


def preferences_are_sound(plan: Plan) -> Problems:
    """Check that no key is set that the loss or the data format does not use, and that the model's
    head can be trained."""
    data, preference = plan.config.data, plan.config.preference
    regression = preference.loss == "regression"
    of_ratings, of_pairs = ("response_field", "rating_field"), ("chosen_field", "rejected_field")
    idle = (*of_pairs, "margin_field") if regression else of_ratings
    reason = f"nothing reads it with preference.loss = {preference.loss}"
    if data.format is not None:
        idle = (*of_ratings, *of_pairs, "prompt_field")
        reason = f"data.format = {data.format} names the fields"
    yield from unread(plan, "data", idle, reason)
    if data.format is not None and (data.format == "helpsteer") != regression:
        legal = "helpsteer" if regression else "another format"
        wrong = f"its rows are {'pairs' if regression else 'ratings'}"
        yield "data.format", f"{wrong}; allowed with preference.loss = {preference.loss}: {legal}"
    if regression and preference.center_coefficient:
        wrong = "the ratings already fix the level of the scores"
        yield "preference.center_coefficient", f"{wrong}; allowed with loss = regression: 0.0"
    if data.max_tokens is not None and data.max_tokens > (most := plan.shape.max_sequence_length):
        yield "data.max_tokens", f"more than max_sequence_length = {most}; allowed: at most that"
    if plan.config.model.lora.rank:
        wrong = "a preference model trains all weights: its new head has no place in an adapter"
        yield "model.lora.rank", f"{wrong}; allowed: 0"


def model_gives_tokens(plan: Plan) -> Problems:
    """Check that the model is a language model. A preference model gives scores and no tokens."""
    if plan.shape.scores:
        key = "hf_path" if plan.config.model.hf_path is not None else "checkpoint_path"
        wrong = "holds a preference model, which gives scores and no tokens"
        yield f"model.{key}", f"{wrong}; allowed: a model that ends in ForCausalLM"
