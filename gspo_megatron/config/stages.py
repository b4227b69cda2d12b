"""The configurations of pre-training and supervised fine-tuning.

What describes the model, its layout and its record is as in an RL run.
"""

from __future__ import annotations

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
    SYSTEM_PROMPT,
    TEMPLATE,
    Positive,
    Section,
    Text,
    Weights,
    harmless,
    key,
    shapes,
)


class StageOptimizerSection(OptimizerSection):
    """AdamW and its learning rate."""

    learning_rate: float = shapes(1e-4, "the peak", gt=0)
    decay: Literal["constant", "linear", "cosine", "wsd"] = shapes(  # ty: ignore[incompatible-attribute-override]
        "cosine", "after the warm-up, until training.steps; wsd: constant, then the decay below"
    )
    wsd_steps: Positive | None = shapes(None, "wsd: the number of steps at the end that decay")
    wsd_decay: Literal["linear", "cosine", "exponential", "minus_sqrt"] = shapes(
        "linear", "wsd: the curve of the decay"
    )


class StageCheckpointSection(CheckpointSection):
    """Saving and resuming."""

    best_metric: Text = harmless("evaluation/logprob", "of metrics.jsonl; higher is better")


class ExportSection(Section):
    """What becomes of the model at the end."""

    hf_path: Text | None = harmless(None, "a new Hugging Face folder to write; null: none")


class StageConfig(RunConfig):
    """The sections that the stages share."""

    phase: ClassVar[str]  # its name in metrics and checkpoints

    optimizer: StageOptimizerSection = Field(default_factory=StageOptimizerSection)
    checkpoint: StageCheckpointSection = Field(default_factory=StageCheckpointSection)
    logging: RecordSection = Field(default_factory=RecordSection)
    export: ExportSection = Field(default_factory=ExportSection)


class FineTuningDataSection(Section):
    """Conversations, or prompts with answers, and the tokenizer."""

    examples: Text | None = key(
        "contents", None, "examples to learn, a .jsonl or .parquet file; required to train"
    )
    eval_examples: Text | None = key("shown", None, "examples to evaluate, .jsonl or .parquet")
    tokenizer: Text = key("contents", ..., "a sentencepiece .model file or a Hugging Face folder")
    messages_field: Text | None = shapes(
        None,
        "the field that holds a conversation, of which the assistant's messages are learned; null: "
        "rows are a prompt and its answer, which is learned",
    )
    prompt_field: Text = shapes("prompt", "the field that holds the prompt")
    answer_field: Text = shapes("answer", "the field that holds the answer")
    template: Text | None = shapes(None, TEMPLATE)
    system_prompt: Text | None = shapes(None, SYSTEM_PROMPT)
    chat_template: bool = shapes(False, "prompts and answers go through the chat template")
    chat_template_options: dict[str, Any] = shapes({}, "variables of the tokenizer's chat template")
    max_tokens: Positive | None = shapes(None, "of an example; null: model.max_sequence_length")
    too_long: Literal["error", "drop", "truncate"] = shapes(
        "error", "a longer example is refused, left out, or cut if a learned token is left"
    )
    shuffle: bool = shapes(True, "a new order in every epoch, from training.seed")


class FineTuningTrainingSection(RunSection):
    """The run itself."""

    steps: Positive | None = key("steps", None, "maximum number of updates; null: epochs decide")
    # What it makes of training.steps counts.
    epochs: Positive | None = harmless(
        None, "maximum number of passes over the examples; null: steps decide, or 1 without them"
    )
    batch_size: Positive = shapes(64, "examples of a step, over all ranks")
    packing: bool = harmless(True, "sequences end to end in a row; false: a padded row each")


class FineTuningConfig(StageConfig):
    """Supervised fine-tuning, one section a subject."""

    phase: ClassVar[str] = "sft"
    inputs: ClassVar[tuple[str, str]] = ("examples", "eval_examples")

    data: FineTuningDataSection
    training: FineTuningTrainingSection = Field(default_factory=FineTuningTrainingSection)

    def max_tokens(self) -> int:
        """data.max_tokens with its default filled in."""
        return self.data.max_tokens or self.resolved_model().max_sequence_length

    def num_examples(self, size: int) -> int:
        """How many examples the run draws from a file of `size`, the last step cut short."""
        training = self.training
        if training.steps is None:
            return (training.epochs or 1) * size
        by_steps = training.steps * training.batch_size
        return by_steps if training.epochs is None else min(by_steps, training.epochs * size)

    def with_steps(self, size: int) -> FineTuningConfig:
        """The same, with training.steps as the number of examples makes it."""
        steps = -(-self.num_examples(size) // self.training.batch_size)
        training = self.training.model_copy(update={"steps": steps})
        return self.model_copy(update={"training": training})


class PretrainingDataSection(Section):
    """Tokenized corpora: indexed datasets of Megatron-Core, PREFIX.bin and PREFIX.idx."""

    train: list[Text] = key("contents", [], "prefixes of .bin and .idx files; required to train")
    weights: Weights | None = shapes(
        None,
        "the share of each prefix in what is learned, up to a common factor; null: in proportion "
        "to its tokens",
    )
    evaluation: list[Text] = key("shown", [], "prefixes of the evaluation, weighted by tokens")
    evaluation_share: float = shapes(
        0.0,
        "instead of evaluation: the share of documents at the end of every training prefix that is "
        "kept for the evaluation",
        ge=0,
        lt=1,
    )
    tokenizer: Text = key("contents", ..., "the tokenizer that the datasets were made with")
    sequence_length: Positive | None = shapes(None, "of a sample; null: model.max_sequence_length")
    mask_end_of_document: bool = shapes(False, "the first token of a next document is not learned")


class PretrainingTrainingSection(RunSection):
    """The run itself."""

    steps: Positive | None = key("steps", None, "maximum number of updates; null: tokens decide")
    tokens: Positive | None = harmless(None, "tokens to learn, up to whole steps; null: see steps")
    batch_size: Positive = shapes(64, "samples of a step, over all ranks")
    evaluation_batches: Positive = harmless(8, "batches of an evaluation; fewer if data are fewer")


class PretrainingConfig(StageConfig):
    """Pre-training, one section a subject."""

    phase: ClassVar[str] = "pretrain"
    inputs: ClassVar[tuple[str, str]] = ("train", "evaluation")
    input_suffix: ClassVar[str] = ".idx"

    data: PretrainingDataSection
    training: PretrainingTrainingSection = Field(default_factory=PretrainingTrainingSection)

    def with_steps(self) -> PretrainingConfig:
        """The same, with training.steps as training.tokens makes it."""
        training = self.training
        if training.tokens is None:
            return self
        by_tokens = -(-training.tokens // (training.batch_size * self.sequence_length()))
        steps = min(training.steps or by_tokens, by_tokens)
        return self.model_copy(update={"training": training.model_copy(update={"steps": steps})})

    def sequence_length(self) -> int:
        """data.sequence_length with its default filled in."""
        return self.data.sequence_length or self.resolved_model().max_sequence_length


AnyConfig = Config | FineTuningConfig | PretrainingConfig
