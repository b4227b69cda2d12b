"""The configurations of pre-training, supervised fine-tuning and preference models.

The sections `model`, `parallel` and `logging` are the same as in the configuration of an RL run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from gspo_megatron.config.schema import (
    CheckpointSection,
    Config,
    OptimizerSection,
    RecordSection,
    RunConfig,
    RunSection,
)
from gspo_megatron.config.section import (
    SHARE_PROMPTS,
    SYSTEM_PROMPT,
    TEMPLATE,
    TOKENIZER,
    HubPath,
    Positive,
    Section,
    Text,
    Weights,
    harmless,
    key,
    shapes,
)
from gspo_megatron.families.model_shape import ModelShape

# Published datasets of preferences; data/preferences.py reads them.
PREFERENCE_FORMATS = (
    "hh_rlhf",
    "ultrafeedback",
    "helpsteer",
    "helpsteer2",
    "helpsteer3",
    "skywork",
)


class StageOptimizerSection(OptimizerSection):
    """AdamW and its learning rate."""

    learning_rate: float = shapes(1e-4, "learning rate after the warm-up", gt=0)
    decay: Literal["constant", "linear", "cosine", "wsd"] = shapes(  # ty: ignore[incompatible-attribute-override]
        "cosine",
        "curve of the learning rate from the warm-up to training.steps; wsd: constant, then "
        "wsd_decay",
    )
    wsd_steps: Positive | None = shapes(
        None, "with wsd: the number of last steps over which the learning rate falls"
    )
    wsd_decay: Literal["linear", "cosine", "exponential", "minus_sqrt"] = shapes(
        "linear", "with wsd: the curve of the last steps"
    )


class StageCheckpointSection(CheckpointSection):
    """Saving and resuming."""

    best_metric: Text = harmless(
        "evaluation/logprob", "a metric of metrics.jsonl; higher is better"
    )


class ExportSection(Section):
    """Where the model is written at the end."""

    hf_path: Text | None = harmless(
        None, "new Hugging Face folder for the model at the end of the run; null: none"
    )


class StageConfig(RunConfig):
    """The sections that all stages except RL share."""

    optimizer: StageOptimizerSection = Field(default_factory=StageOptimizerSection)
    checkpoint: StageCheckpointSection = Field(default_factory=StageCheckpointSection)
    logging: RecordSection = Field(default_factory=RecordSection)
    export: ExportSection = Field(default_factory=ExportSection)


class FineTuningDataSection(Section):
    """Conversations, or prompts with answers, and the tokenizer."""

    examples: HubPath | None = key(
        "contents",
        None,
        "examples to learn: a .jsonl or .parquet file, a folder of such files, or ORG/NAME[:SPLIT]"
        "[@REVISION] of the Hub; required to train",
    )
    eval_examples: HubPath | None = key(
        "shown", None, "held-out examples, in a form of data.examples"
    )
    tokenizer: HubPath = key("contents", ..., TOKENIZER)
    messages_field: Text | None = shapes(
        None,
        "the field that holds a conversation; the assistant's messages are learned; null: rows "
        "have a prompt and an answer, and the answer is learned",
    )
    prompt_field: Text = shapes("prompt", "the field that holds the prompt")
    answer_field: Text = shapes("answer", "the field that holds the answer")
    template: Text | None = shapes(None, TEMPLATE)
    system_prompt: Text | None = shapes(None, SYSTEM_PROMPT)
    chat_template: bool = shapes(False, "prompts and answers go through the chat template")
    chat_template_options: dict[str, Any] = shapes({}, "variables of the tokenizer's chat template")
    max_tokens: Positive | None = shapes(
        None, "largest number of tokens of an example; null: model.max_sequence_length"
    )
    too_long: Literal["error", "drop", "truncate"] = shapes(
        "error",
        "what happens to a longer example: it is an error (error); it is left out (drop); its end "
        "is cut off, if a token to learn is left (truncate)",
    )
    shuffle: bool = shapes(
        True, "take the examples in a new order in every epoch, from training.seed"
    )


class FineTuningTrainingSection(RunSection):
    """The run itself."""

    steps: Positive | None = key("steps", None, "maximum number of updates; null: epochs decide")
    # "harmless" here, because the resulting training.steps is compared on resume.
    epochs: Positive | None = harmless(
        None,
        "maximum number of passes over the examples; null: steps decide, or 1 if steps is null too",
    )
    batch_size: Positive = shapes(
        64, "number of examples of a step, over all ranks; in epochs at most those of the file"
    )
    packing: bool = harmless(
        True,
        "put the sequences of a micro-batch into one row, without padding; false: a padded row "
        "for each",
    )


class ExamplesConfig(StageConfig):
    """A stage that learns from the rows of a file, in epochs."""

    training: FineTuningTrainingSection = Field(default_factory=FineTuningTrainingSection)

    def max_tokens(self) -> int:
        """data.max_tokens with its default filled in."""
        return self.data.max_tokens or self.resolved_model().max_sequence_length

    def examples_of_step(self, size: int) -> int:
        """Return how many examples a step takes, if the file has `size` examples. In a run of
        epochs it takes none of them twice, so that each epoch has at least one step."""
        training = self.training
        if training.epochs is None and training.steps is not None:
            return training.batch_size
        return min(training.batch_size, size)

    def num_examples(self, size: int) -> int:
        """Return how many examples the run uses in all its epochs, if the file has `size` examples.
        The last step may have fewer examples than the other steps."""
        training = self.training
        if training.steps is None:
            return (training.epochs or 1) * size
        by_steps = training.steps * self.examples_of_step(size)
        return by_steps if training.epochs is None else min(by_steps, training.epochs * size)

    def with_steps(self, size: int) -> Any:
        """Return the configuration with training.steps computed from the number of examples."""
        training = self.training
        update = {"steps": -(-self.num_examples(size) // self.examples_of_step(size))}
        if training.steps is None:  # otherwise a second pass would fill up the last step
            update["epochs"] = training.epochs or 1
        training = training.model_copy(update=update)
        return self.model_copy(update={"training": training})


class FineTuningConfig(ExamplesConfig):
    """The configuration of supervised fine-tuning."""

    phase: ClassVar[str] = "sft"
    inputs: ClassVar[tuple[str, str]] = ("examples", "eval_examples")

    data: FineTuningDataSection


class PreferenceDataSection(Section):
    """Preferences between responses, or ratings of responses, and the tokenizer."""

    preferences: HubPath | None = key(
        "contents",
        None,
        "preferences to learn: a .jsonl or .parquet file, a folder of such files, or ORG/NAME"
        "[:SPLIT][@REVISION] of the Hub; required to train",
    )
    eval_preferences: HubPath | None = key(
        "shown", None, "held-out preferences, in a form of data.preferences"
    )
    tokenizer: HubPath = key("contents", ..., TOKENIZER)
    format: Literal[PREFERENCE_FORMATS] | None = shapes(  # ty: ignore[invalid-type-form]
        None,
        "the published dataset that the rows come from; replaces the fields of prompt, responses "
        "and rating",
    )
    prompt_field: Text | None = shapes(
        None,
        "the field that holds what comes before the responses, a text or messages; null: each "
        "response is a whole text or conversation",
    )
    chosen_field: Text = shapes("chosen", "the field that holds the better response")
    rejected_field: Text = shapes(
        "rejected", "the field that holds the worse response, or an array of worse responses"
    )
    margin_field: Text | None = shapes(
        None,
        "the field that holds the margin by which the score of the chosen response must be larger: "
        "a number from 0, or an array with a number for each rejected response; null: no margin",
    )
    response_field: Text = shapes(
        "response", "with preference.loss = regression: the field that holds the response"
    )
    rating_field: Text = shapes(
        "rating", "with preference.loss = regression: the field that holds the rating, a number"
    )
    source_field: Text | None = shapes(
        None, "a field with the source of a row; evaluations also list each source; null: none"
    )
    system_prompt: Text | None = shapes(None, SYSTEM_PROMPT)
    chat_template: bool = shapes(
        False, "prompts and responses that are texts go through the chat template, as messages do"
    )
    chat_template_options: dict[str, Any] = shapes({}, "variables of the tokenizer's chat template")
    max_tokens: Positive | None = shapes(
        None,
        "largest number of tokens of a prompt with a response; a pair with a longer response is "
        "left out and counted; null: model.max_sequence_length",
    )
    shuffle: bool = shapes(
        True, "take the preferences in a new order in every epoch, from training.seed"
    )


class PreferenceSection(Section):
    """What the scores learn."""

    loss: Literal["bradley_terry", "regression"] = shapes(
        "bradley_terry",
        "bradley_terry: the probability that the chosen response is better, a sigmoid of the "
        "difference of both scores; regression: the squared error of a score from a rating",
    )
    center_coefficient: float = shapes(
        0.0,
        "coefficient of a penalty that keeps the scores around 0: the squared sum of the two "
        "scores of a pair, as a mean over pairs; 0.01 is usual; 0.0: off",
        ge=0,
    )


class PreferenceTrainingSection(FineTuningTrainingSection):
    """The run itself."""

    share_prompts: bool | None = harmless(None, SHARE_PROMPTS)


class PreferenceCheckpointSection(CheckpointSection):
    """Saving and resuming."""

    best_metric: Text = harmless(
        "evaluation/accuracy", "a metric of metrics.jsonl; higher is better"
    )


class PreferenceConfig(ExamplesConfig):
    """The configuration of the training of a preference model."""

    phase: ClassVar[str] = "reward_model"
    inputs: ClassVar[tuple[str, str]] = ("preferences", "eval_preferences")

    data: PreferenceDataSection
    preference: PreferenceSection = Field(default_factory=PreferenceSection)
    training: PreferenceTrainingSection = Field(default_factory=PreferenceTrainingSection)
    checkpoint: PreferenceCheckpointSection = Field(default_factory=PreferenceCheckpointSection)  # ty: ignore[incompatible-attribute-override]

    def resolved_model(self) -> ModelShape:
        """Return the model with a score head, even if training starts from a language model."""
        return replace(super().resolved_model(), scores=True)


class PretrainingDataSection(Section):
    """Tokenized corpora: indexed datasets of Megatron-Core, PREFIX.bin and PREFIX.idx."""

    train: list[Text] = key("contents", [], "prefixes of .bin and .idx files; required to train")
    weights: Weights | None = shapes(
        None,
        "the share of each prefix in the samples, up to a common factor; null: in proportion to "
        "its tokens",
    )
    evaluation: list[Text] = key(
        "shown", [], "prefixes of held-out .bin and .idx files, weighted by their tokens"
    )
    evaluation_share: float = shapes(
        0.0,
        "instead of data.evaluation: the share of documents at the end of each training prefix "
        "that is held out for the evaluation",
        ge=0,
        lt=1,
    )
    tokenizer: HubPath = key("contents", ..., "the tokenizer that the datasets were made with")
    sequence_length: Positive | None = shapes(
        None, "number of tokens of a sample; null: model.max_sequence_length"
    )
    mask_end_of_document: bool = shapes(
        False,
        "do not learn to predict the first token of a document from the document before it",
    )


class PretrainingTrainingSection(RunSection):
    """The run itself."""

    steps: Positive | None = key("steps", None, "maximum number of updates; null: tokens decide")
    tokens: Positive | None = harmless(
        None, "number of tokens to learn, rounded up to whole steps; null: see steps"
    )
    batch_size: Positive = shapes(64, "number of samples of a step, over all ranks")
    evaluation_batches: Positive = harmless(
        8, "number of batches of an evaluation, fewer if there are fewer data"
    )


class PretrainingConfig(StageConfig):
    """The configuration of pre-training."""

    phase: ClassVar[str] = "pretrain"
    inputs: ClassVar[tuple[str, str]] = ("train", "evaluation")
    input_suffix: ClassVar[str] = ".idx"

    data: PretrainingDataSection
    training: PretrainingTrainingSection = Field(default_factory=PretrainingTrainingSection)

    def with_steps(self) -> PretrainingConfig:
        """Return the configuration with training.steps computed from training.tokens."""
        training = self.training
        if training.tokens is None:
            return self
        by_tokens = -(-training.tokens // (training.batch_size * self.sequence_length()))
        steps = min(training.steps or by_tokens, by_tokens)
        return self.model_copy(update={"training": training.model_copy(update={"steps": steps})})

    def sequence_length(self) -> int:
        """data.sequence_length with its default filled in."""
        return self.data.sequence_length or self.resolved_model().max_sequence_length


AnyConfig = Config | FineTuningConfig | PretrainingConfig | PreferenceConfig
