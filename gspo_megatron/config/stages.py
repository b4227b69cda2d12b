"""The configurations of pre-training and supervised fine-tuning.

The sections that describe the model, its layout and its record are those of an RL run; data and
training are each stage's own.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from gspo_megatron.config.checkpointing import CheckpointSection
from gspo_megatron.config.precision import Precision
from gspo_megatron.config.schema import OptimizerSection, RunConfig
from gspo_megatron.config.section import NotNegative, Positive, Section, Seed, Text

PRETRAINING, FINE_TUNING = "pretrain", "sft"  # the phases' names in metrics and checkpoints


class StageOptimizerSection(OptimizerSection):
    """AdamW and its learning rate."""

    learning_rate: Annotated[float, Field(gt=0)] = Field(1e-4, description="the peak")
    decay: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "cosine",
        description="after the warm-up, until training.steps; wsd: constant, then the decay below",
    )
    wsd_steps: Positive | None = Field(None, description="wsd: so many steps at the end decay")
    wsd_decay: Literal["linear", "cosine", "exponential", "minus_sqrt"] = Field(
        "linear", description="wsd: the curve of the decay"
    )


class StageTrainingSection(Section):
    """What both stages need to know of the run."""

    seed: Seed = Field(1, description="of weights and data order")
    precision: Precision = Field(
        "bf16",
        description="of weights and activations; fp64 is for `verify` and cannot train; the last "
        "three: matrix products in FP8 by Transformer Engine, everything else as in bf16",
    )
    micro_batch_tokens: Positive = Field(
        4096, description="token budget of a micro-batch: bounds the memory of activations"
    )
    evaluation_interval: NotNegative = Field(
        0, description="steps between evaluations; 0: at start and end only"
    )
    recompute: Literal["none", "full", "selective"] = Field(
        "none", description="activations recomputed in the backward pass to save memory"
    )
    hang_timeout_seconds: NotNegative = Field(
        1200, description="so long a rank may stand still before the run is ended; 0: for ever"
    )
    stop_margin_seconds: NotNegative = Field(
        300,
        description="time left of a Slurm job, besides that of the longest step so far, at which "
        "the run is saved and stops",
    )
    idle_restarts: NotNegative = Field(
        3, description="restarts of a Slurm job at the same point of the run; one more ends it"
    )


class StageCheckpointSection(CheckpointSection):
    """Saving and resuming."""

    best_metric: Text = Field(
        "evaluation/logprob", description="a figure of metrics.jsonl; the higher the better"
    )


class StageLoggingSection(Section):
    """Where the record of the run goes."""

    dir: Text | None = Field(None, description="the run folder; null: runs/<config file's name>")
    trackers: list[Literal["tensorboard", "wandb", "mlflow"]] = Field(
        default_factory=list, description="where metrics go besides metrics.jsonl"
    )
    plots: bool = Field(True, description="draw plots/*.png at the end")


class ExportSection(Section):
    """What becomes of the model at the end."""

    hf_path: Text | None = Field(
        None, description="a Hugging Face folder to write, which must not exist; null: none"
    )


class StageConfig(RunConfig):
    """The sections that the stages share."""

    phase: ClassVar[str]

    optimizer: StageOptimizerSection = Field(default_factory=StageOptimizerSection)
    checkpoint: StageCheckpointSection = Field(default_factory=StageCheckpointSection)
    logging: StageLoggingSection = Field(default_factory=StageLoggingSection)
    export: ExportSection = Field(default_factory=ExportSection)

    @abstractmethod
    def input_files(self) -> dict[str, list[str]]:
        """What is read to train, by the key that names it; the tokenizer left out."""


class FineTuningDataSection(Section):
    """Conversations, or prompts with answers, and the tokenizer."""

    examples: Text | None = Field(
        None, description="examples to learn, a .jsonl or .parquet file; required to train"
    )
    eval_examples: Text | None = Field(None, description="examples of the evaluation, likewise")
    tokenizer: Text = Field(
        description="a sentencepiece .model file or a folder with a Hugging Face tokenizer"
    )
    messages_field: Text | None = Field(
        None,
        description="the field that holds a conversation, learned where the assistant speaks; "
        "null: rows are a prompt and its answer, which is learned",
    )
    prompt_field: Text = Field("prompt", description="the field that holds the prompt")
    answer_field: Text = Field("answer", description="the field that holds the answer")
    chat_template: bool = Field(
        False, description="a prompt and its answer go through the tokenizer's chat template"
    )
    max_tokens: Positive | None = Field(
        None, description="of an example; null: model.max_sequence_length"
    )
    too_long: Literal["error", "drop", "truncate"] = Field(
        "error",
        description="a longer example is refused, left out, or cut if a learned token is left",
    )
    shuffle: bool = Field(True, description="a fresh order every epoch, from training.seed")


class FineTuningTrainingSection(StageTrainingSection):
    """The run itself."""

    steps: Positive | None = Field(None, description="optimizer updates at most; null: epochs tell")
    epochs: Positive | None = Field(
        None, description="passes over the examples at most; null: steps tell, or 1 without them"
    )
    batch_size: Positive = Field(64, description="examples of a step, over all ranks")
    packing: bool = Field(
        True, description="sequences end to end in a row; false: a row each, padded to the longest"
    )


class FineTuningConfig(StageConfig):
    """Supervised fine-tuning, one section a subject."""

    phase: ClassVar[str] = FINE_TUNING

    data: FineTuningDataSection
    training: FineTuningTrainingSection = Field(default_factory=FineTuningTrainingSection)

    def input_files(self) -> dict[str, list[str]]:
        files = {"data.examples": self.data.examples, "data.eval_examples": self.data.eval_examples}
        return {key: [path] for key, path in files.items() if path is not None}

    def max_tokens(self) -> int:
        """data.max_tokens with its default filled in."""
        return self.data.max_tokens or self.resolved_model().max_sequence_length

    def num_examples(self, size: int) -> int:
        """How many examples the run draws from a file of `size`, the last step cut short."""
        training = self.training
        by_steps = None if training.steps is None else training.steps * training.batch_size
        if training.epochs is None and by_steps is not None:
            return by_steps
        by_epochs = (training.epochs or 1) * size
        return by_epochs if by_steps is None else min(by_steps, by_epochs)

    def with_steps(self, size: int) -> FineTuningConfig:
        """The same, with training.steps as the number of examples makes it."""
        steps = -(-self.num_examples(size) // self.training.batch_size)
        training = self.training.model_copy(update={"steps": steps})
        return self.model_copy(update={"training": training})


class PretrainingDataSection(Section):
    """Tokenized corpora: datasets of Megatron-Core's, as tools/prepare_data.py writes them."""

    train: list[Text] = Field(
        default_factory=list,
        description="prefixes of .bin and .idx files to learn; required to train",
    )
    weights: list[Annotated[float, Field(gt=0)]] | None = Field(
        None,
        description="share of each prefix in what is learned, up to a common factor; null: in "
        "proportion to its tokens",
    )
    evaluation: list[Text] = Field(
        default_factory=list,
        description="prefixes of the evaluation, in proportion to their tokens",
    )
    evaluation_share: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="or else: documents at the end of every training prefix kept for it"
    )
    tokenizer: Text = Field(description="the tokenizer that the datasets were made with")
    sequence_length: Positive | None = Field(
        None, description="tokens of a sample; null: model.max_sequence_length"
    )
    mask_end_of_document: bool = Field(
        False, description="where a document has ended, the token after it is not learned"
    )


class PretrainingTrainingSection(StageTrainingSection):
    """The run itself."""

    steps: Positive | None = Field(None, description="optimizer updates at most; null: tokens tell")
    tokens: Positive | None = Field(
        None, description="tokens to learn at least, the last step whole; null: steps tell"
    )
    batch_size: Positive = Field(64, description="samples of a step, over all ranks")
    evaluation_batches: Positive = Field(
        8, description="batches of an evaluation; fewer where its data hold fewer"
    )


class PretrainingConfig(StageConfig):
    """Pre-training, one section a subject."""

    phase: ClassVar[str] = PRETRAINING

    data: PretrainingDataSection
    training: PretrainingTrainingSection = Field(default_factory=PretrainingTrainingSection)

    def input_files(self) -> dict[str, list[str]]:
        files = {"data.train": self.data.train, "data.evaluation": self.data.evaluation}
        return {
            key: [f"{prefix}.idx" for prefix in prefixes]
            for key, prefixes in files.items()
            if prefixes
        }

    def with_steps(self) -> PretrainingConfig:
        """The same, with training.steps as training.tokens makes it."""
        training = self.training
        if training.tokens is None:
            return self
        by_tokens = -(-training.tokens // (training.batch_size * self.sequence_length()))
        steps = by_tokens if training.steps is None else min(training.steps, by_tokens)
        return self.model_copy(update={"training": training.model_copy(update={"steps": steps})})

    def sequence_length(self) -> int:
        """data.sequence_length with its default filled in."""
        return self.data.sequence_length or self.resolved_model().max_sequence_length
