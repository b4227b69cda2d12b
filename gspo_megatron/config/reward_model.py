"""The configuration of a reward model: where its scores come from and how they are normalised."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from gspo_megatron.config.section import HubPath, Positive, Section, Text, harmless, shapes

if TYPE_CHECKING:
    from gspo_megatron.config.schema import RewardSection

REWARD_MODEL = "reward_model"  # the value of reward.name if the model gives the whole reward
PART = "model"  # the name of the model's part of the reward
_BATCH = 16


class RewardModelSection(Section):
    """A model of preferences that scores each response with one number."""

    folder: HubPath | None = shapes(
        None,
        "Hugging Face folder of a ...ForSequenceClassification model with one label, or "
        "ORG/NAME[@REVISION] of the Hub; the training ranks compute its scores between rollout and "
        "update; null: none",
    )
    url: Text | None = harmless(
        None,
        "a server that gives the scores of a reward model by vLLM's /classify, as "
        "http://host:port; null: none",
    )
    tokenizer: HubPath | None = shapes(
        None,
        "Hugging Face folder with the model's own tokenizer and chat template, or "
        "ORG/NAME[@REVISION] of the Hub; null: the tokenizer in folder",
    )
    chat_template: bool | None = shapes(
        None,
        "the tokenizer's chat template renders prompt and response; false: they are one "
        "text; null: true if the tokenizer has a template",
    )
    chat_template_options: dict[str, Any] = shapes(
        {}, "variables of the chat template of the model's tokenizer"
    )
    max_tokens: Positive | None = shapes(
        None,
        "longest conversation in the model's tokens; a longer one loses its first tokens; null: "
        "what the model takes",
    )
    batch_size: Positive = harmless(_BATCH, "conversations in a request to url")
    normalize: Literal["none", "running", "group"] = shapes(
        "none",
        "whether a score is normalized before scale, by the mean and the standard deviation of all "
        "scores of the run so far (running) or of the scores of the prompt's group (group)",
    )

    @property
    def is_on(self) -> bool:
        """Whether there is a reward model."""
        return self.folder is not None or self.url is not None

    @property
    def source(self) -> str:
        """The key and value that name the model, for messages."""
        key = "url" if self.url is not None else "folder"
        return f"reward.model.{key} = {getattr(self, key)}"

    @property
    def tokenizer_folder(self) -> str:
        """The value of `tokenizer` with its default filled in."""
        return self.tokenizer or self.folder or ""


def reward_model_problems(reward: RewardSection) -> Iterator[tuple[str, str]]:
    """Yield the problems of reward.model: the key below `reward`, and what is wrong."""
    model = reward.model
    if not model.is_on:
        if reward.name == REWARD_MODEL and reward.import_path is None:
            wrong = "needs a model that scores; allowed: reward.model.url or reward.model.folder"
            yield "name", wrong
        wrong = "nothing reads it without reward.model.url or reward.model.folder"
        for name, _ in model.unread(RewardModelSection.model_fields, wrong):
            yield f"model.{name}", f"{wrong}; allowed: leave it out"
        return
    if model.url is not None:
        if model.folder is not None:
            yield "model.url", "reward.model.folder names a model already; allowed: one of them"
        if not re.fullmatch(r"https?://[^/\s]+/?", model.url):
            yield "model.url", "allowed: http://host:port"
        if model.tokenizer is None:
            wrong = "reward.model.url needs the model's own tokenizer, which makes the tokens"
            yield "model.tokenizer", f"{wrong}; allowed: a Hugging Face folder"
    elif model.batch_size != _BATCH:
        yield "model.batch_size", f"nothing reads it without reward.model.url; allowed: {_BATCH}"
    if model.chat_template is False and model.chat_template_options:
        wrong = "nothing reads it with chat_template = false; allowed: {}"
        yield "model.chat_template_options", wrong
