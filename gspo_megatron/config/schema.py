"""Every key of a configuration: its type, its default and what it means.

What one key alone can get wrong is refused here; what several keys together get wrong, in rules.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from gspo_megatron.config.algorithm import ObjectiveSection, RoutingSection
from gspo_megatron.config.checkpointing import CheckpointSection
from gspo_megatron.config.parallel import LAYOUT_KEYS, Layout, expand_layout
from gspo_megatron.config.precision import Precision
from gspo_megatron.config.section import ImportPath, NotNegative, Positive, Section, Seed, Text
from gspo_megatron.config.shape import ModelShape, resolve_shape


class ModelSection(Section):
    """What is trained."""

    preset: Literal["tiny", "qwen3-30b-a3b", "qwen3-235b-a22b"] = Field(
        "tiny", description="the named shape to start from"
    )
    hf_path: Text | None = Field(
        None, description="Hugging Face folder with the weights to start from; null: random weights"
    )
    checkpoint_path: Text | None = Field(
        None,
        description="a checkpoint of ours with the weights to start from; of a run folder, or of "
        "its checkpoints folder, the newest; null: random weights",
    )
    backend: Literal["auto", "torch_native", "transformer_engine"] = Field(
        "auto",
        description="layer implementation; auto takes Transformer Engine on a GPU that has it, in "
        "bf16 and FP8",
    )
    vocab_size: Positive | None = Field(
        None, description="null: the preset's, else the tokenizer's size"
    )
    max_sequence_length: Positive | None = Field(
        None, description="prompt and response together, in tokens; null: the preset's"
    )
    rotary_base: Annotated[float, Field(gt=0)] | None = Field(
        None, description="base of the rotary position embedding; null: the preset's"
    )
    tie_embeddings: bool | None = Field(
        None, description="share input and output embedding; null: the preset's"
    )
    megatron: dict[str, Any] = Field(
        default_factory=dict,
        description="any field of the installed TransformerConfig, over the preset's",
    )


class ParallelSection(Section):
    """Over how many ranks each axis is split."""

    layout: Text | None = Field(
        None, description='short form of the sizes below, as in "tp=2,pp=2,ep=2"'
    )
    tensor_model_parallel_size: Positive = Field(1, description="tp: shards of every matrix")
    pipeline_model_parallel_size: Positive = Field(1, description="pp: stages of the layer stack")
    virtual_pipeline_model_parallel_size: Positive | None = Field(
        None, description="vpp: chunks of layers a stage holds (interleaved schedule)"
    )
    expert_model_parallel_size: Positive = Field(1, description="ep: shards of the set of experts")
    expert_tensor_parallel_size: Positive | None = Field(
        None,
        description="etp: shards of every expert's matrices; null: 1, where Megatron's own default "
        "is tp. Expert matrices are small: cutting them costs communication and saves nothing that "
        "ep does not save",
    )
    context_parallel_size: Positive = Field(1, description="cp: shards of every sequence")
    sequence_parallel: bool | None = Field(
        None, description="split activations between matrices over tp; null: on when tp > 1"
    )
    data_parallel_size: Positive | None = Field(
        None, description="dp: copies of the model; null: world size / (tp * pp * cp)"
    )
    ddp: dict[str, Any] = Field(
        default_factory=dict,
        description="any field of the installed DistributedDataParallelConfig",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_from_layout(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        filled, problems = expand_layout(values)
        if problems:
            raise PydanticCustomError("layout", "{text}", {"text": "\n".join(problems)})
        return filled

    @field_validator("virtual_pipeline_model_parallel_size")
    @classmethod
    def _one_chunk_is_none(cls, value: int | None) -> int | None:
        """One chunk a stage is no interleaving."""
        return None if value == 1 else value

    def uses_sequence_parallel(self) -> bool:
        """sequence_parallel with its default filled in."""
        if self.sequence_parallel is None:
            return self.tensor_model_parallel_size > 1
        return self.sequence_parallel


class DataSection(Section):
    """Prompts and tokenizer."""

    prompts: Text | None = Field(
        None, description="training prompts, a .jsonl or .parquet file; required to train"
    )
    eval_prompts: Text | None = Field(None, description="prompts of the evaluation, likewise")
    tokenizer: Text = Field(
        description="a sentencepiece .model file or a folder with a Hugging Face tokenizer"
    )
    prompt_field: Text = Field("prompt", description="the field that holds the prompt")
    answer_field: Text = Field("answer", description="the field that holds the right answer")
    max_prompt_tokens: Positive | None = Field(
        None, description="null: model.max_sequence_length - rollout.max_response_tokens"
    )
    chat_template: bool = Field(False, description="wrap prompts in the tokenizer's chat template")
    shuffle: bool = Field(True, description="a fresh order every epoch, from training.seed")


class RolloutSection(Section):
    """How responses are sampled."""

    engine: Literal["megatron"] = Field("megatron", description="what generates the responses")
    group_size: Positive = Field(8, description="responses to each prompt")
    prompts_per_step: Positive = Field(16, description="prompts of a step, over all ranks")
    max_response_tokens: Positive = Field(32, description="a longer response is cut off there")
    temperature: Annotated[float, Field(gt=0)] = Field(1.0, description="1.0: the model itself")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="nucleus; 1.0: off")
    top_k: NotNegative = Field(0, description="the likeliest tokens only; 0: off")
    stop: list[Text] = Field(default_factory=list, description="texts that end a response")
    batch_size: Positive | None = Field(
        None, description="sequences decoded together on a rank, in whole groups; null: all of them"
    )
    dynamic_sampling: bool = Field(
        False, description="train on groups with a spread of shaped rewards only, and draw more"
    )
    max_refills: NotNegative = Field(4, description="further batches of prompts a step may draw")


class RewardSection(Section):
    """What a response is worth."""

    name: Text = Field("exact_match", description="a registered reward")
    import_path: ImportPath | None = Field(
        None, description="a function of your own, package.module:function; replaces name"
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of the reward"
    )
    scale: Annotated[float, Field(gt=0)] = Field(1.0, description="first, rewards are multiplied")
    clip: Annotated[float, Field(gt=0)] | None = Field(
        None, description="then cut to [-clip, clip], each turn's by itself; null: they are not"
    )
    overlong_buffer: Positive | None = Field(
        None, description="tokens below max_response_tokens that cost more and more; null: none do"
    )
    overlong_penalty: Annotated[float, Field(gt=0)] = Field(
        1.0, description="what all of the buffer, or a cut response, costs; taken off last"
    )


class OptimizerSection(Section):
    """AdamW and its learning rate."""

    learning_rate: Annotated[float, Field(gt=0)] = Field(1e-6, description="the peak")
    min_learning_rate: Annotated[float, Field(ge=0)] = Field(0.0, description="where decay ends")
    warmup_steps: NotNegative = Field(0, description="steps of linear warm-up")
    decay: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="after the warm-up, until training.steps"
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.1, description="decoupled")
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="of the first moment")
    beta2: Annotated[float, Field(ge=0, lt=1)] = Field(0.95, description="of the second moment")
    epsilon: Annotated[float, Field(gt=0)] = Field(1e-8, description="in Adam's denominator")
    clip_grad: Annotated[float, Field(ge=0)] = Field(
        1.0, description="largest global gradient norm; 0: no clipping"
    )
    megatron: dict[str, Any] = Field(
        default_factory=dict, description="any field of the installed OptimizerConfig"
    )


class WarmStartSection(Section):
    """Supervised steps on prompt and answer before RL, so that rewards start above zero."""

    steps: NotNegative = Field(0, description="0: no warm start")
    batch_size: Positive = Field(64, description="prompts of a step, over all ranks")
    learning_rate: Annotated[float, Field(gt=0)] = Field(1e-3, description="the peak")
    prompts: Text | None = Field(None, description="null: data.prompts")
    warmup_steps: NotNegative = Field(0, description="steps of linear warm-up")
    target_accuracy: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="held-out accuracy that ends the warm start before `steps`, looked at every "
        "5 steps: RL then starts from models of like quality, whatever the seed; null: all steps",
    )


class TrainingSection(Section):
    """The run itself."""

    steps: Positive = Field(100, description="RL steps: roll out, score, update")
    seed: Seed = Field(1, description="of weights, data order and sampling")
    precision: Precision = Field(
        "bf16",
        description="of weights and activations; fp64 for `verify` alone; the last three: matrix "
        "products in FP8 by Transformer Engine, everything else as in bf16",
    )
    micro_batch_tokens: Positive = Field(
        4096, description="token budget of a micro-batch: bounds the memory of activations"
    )
    packing: bool = Field(
        True, description="sequences end to end in a row; false: a row each, padded to the longest"
    )
    evaluation_interval: NotNegative = Field(
        0, description="steps between evaluations; 0: at start and end only"
    )
    evaluation_prompts: Positive = Field(256, description="at most so many of data.eval_prompts")
    recompute: Literal["none", "full", "selective"] = Field(
        "none", description="activations recomputed in the backward pass to save memory"
    )
    dump_batches: NotNegative = Field(
        0,
        description="the inputs of the last so many steps are kept in the run folder, for "
        "`verify --from-dump`; 0: none",
    )
    hang_timeout_seconds: NotNegative = Field(
        1200,
        description="so long a rank may stand still before the run is ended, with the stacks of "
        "every rank; 0: for ever",
    )
    stop_margin_seconds: NotNegative = Field(
        300,
        description="time left of a Slurm job, besides that of the longest step so far, at which "
        "the run is saved and stops",
    )
    idle_restarts: NotNegative = Field(
        3, description="restarts of a Slurm job at the same point of the run; one more ends it"
    )
    warm_start: WarmStartSection = Field(
        default_factory=WarmStartSection, description="supervised steps before RL"
    )


class LoggingSection(Section):
    """Where the record of the run goes."""

    dir: Text | None = Field(None, description="the run folder; null: runs/<config file's name>")
    trackers: list[Literal["tensorboard", "wandb", "mlflow"]] = Field(
        default_factory=list, description="where metrics go besides metrics.jsonl"
    )
    samples_per_step: NotNegative = Field(2, description="responses a step kept in samples.jsonl")
    plots: bool = Field(True, description="draw plots/*.png at the end")


class RunConfig(Section):
    """A model on a layout: what a run of any stage has."""

    model: ModelSection = Field(default_factory=ModelSection)
    parallel: ParallelSection = Field(default_factory=ParallelSection)

    def layout(self) -> Layout:
        """The parallel section in short form."""
        return Layout(**{short: getattr(self.parallel, key) for short, key in LAYOUT_KEYS.items()})

    def world_size_hint(self) -> int:
        """Ranks the layout asks for: the smallest possible number where dp is left open."""
        return self.layout().world_size

    def resolved_model(self) -> ModelShape:
        """The model's sizes, preset and `model` section merged."""
        return resolve_shape(self.model)


class Config(RunConfig):
    """A whole configuration, one section a subject."""

    data: DataSection
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    reward: RewardSection = Field(default_factory=RewardSection)
    objective: ObjectiveSection = Field(default_factory=ObjectiveSection)
    routing: RoutingSection = Field(default_factory=RoutingSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    training: TrainingSection = Field(default_factory=TrainingSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    logging: LoggingSection = Field(default_factory=LoggingSection)

    def max_prompt_tokens(self) -> int:
        """data.max_prompt_tokens with its default filled in."""
        if self.data.max_prompt_tokens is not None:
            return self.data.max_prompt_tokens
        return self.resolved_model().max_sequence_length - self.rollout.max_response_tokens
