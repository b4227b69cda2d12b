"""Every key of an RL configuration: its type, default, limits and meaning.

Rules for several keys together are in rules.py; pre-training and fine-tuning are in stages.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from gspo_megatron.config.lora import LoraSection
from gspo_megatron.config.objectives import ObjectiveSection
from gspo_megatron.config.parallel import LAYOUT_KEYS, Layout, ParallelSection
from gspo_megatron.config.phases import PHASES, Phase
from gspo_megatron.config.precision import Precision
from gspo_megatron.config.reward_model import RewardModelSection
from gspo_megatron.config.section import (
    FORMAT,
    MOST_SECONDS,
    SHARE_PROMPTS,
    SYSTEM_PROMPT,
    TEMPLATE,
    TOKENIZER,
    Date,
    HubPath,
    HubPaths,
    ImportPath,
    NotNegative,
    Positive,
    Section,
    Seed,
    SuiteName,
    Text,
    Weights,
    harmless,
    key,
    shapes,
)
from gspo_megatron.config.selection import SelectionSection
from gspo_megatron.config.servers import VllmSection
from gspo_megatron.families import PRESETS, Family, family_of, family_of_shape, preset_of_folder
from gspo_megatron.families.model_shape import (
    WHOLE_MODEL_KEYS,
    ModelPreset,
    ModelShape,
    config_of_weights,
    preset_of_checkpoint,
    shape_of,
)


class ModelSection(Section):
    """What is trained."""

    preset: Literal[tuple(PRESETS)] | None = shapes(  # ty: ignore[invalid-type-form]
        None,
        "the name of a model shape; null: the shape of hf_path or checkpoint_path, or tiny without "
        "them",
    )
    hf_path: HubPath | None = shapes(
        None,
        "Hugging Face folder of starting weights, or ORG/NAME[@REVISION] of the Hub; null: random",
    )
    ignore_custom_code: bool = harmless(
        False,
        "load hf_path, and a teacher's folder, by model_type alone if config.json names Python "
        "code of its own (auto_map); this code is never run",
    )
    checkpoint_path: Text | None = shapes(
        None,
        "checkpoint of gspo-megatron with the weights to start from; a run folder or its "
        "checkpoints folder stands for its newest checkpoint; null: random weights",
    )
    backend: Literal["auto", "torch_native", "transformer_engine"] = shapes(
        "auto",
        "layer implementation; auto: Transformer Engine on a GPU that has it, in bf16 and FP8",
    )
    vocab_size: Positive | None = shapes(None, "vocabulary; null: the preset's or tokenizer's")
    max_sequence_length: Positive | None = shapes(
        None, "largest number of tokens of prompt and response together; null: the preset's"
    )
    rotary_base: float | None = shapes(None, "base of rotary positions; null: the preset's", gt=0)
    tie_embeddings: bool | None = shapes(None, "one input and output embedding; null: the preset's")
    megatron: dict[str, Any] = shapes({}, "fields of TransformerConfig, in place of the preset's")
    lora: LoraSection = Field(default_factory=LoraSection)

    @model_validator(mode="before")
    @classmethod
    def _default_preset(cls, values: Any) -> Any:
        """Set the default preset if no key defines the shape, so that a dump names it."""
        sources = ("preset", "hf_path", "checkpoint_path")
        if isinstance(values, dict) and all(values.get(name) is None for name in sources):
            return {**values, "preset": "tiny"}
        return values

    def starting_shape(self) -> ModelPreset:
        """Return the model before other keys change it. Raises ConfigError if the file that
        describes the model cannot be read."""
        if self.hf_path is not None:
            return preset_of_folder(self.hf_path)
        if self.preset is None and self.checkpoint_path is not None:
            return preset_of_checkpoint(self.checkpoint_path)
        return PRESETS[self.preset or "tiny"]

    def family(self, shape: ModelShape) -> Family:
        """Return the family that names the tensors. It is the family of the config.json of the
        weights, or, without a config.json, a family that has models of this shape. Raises
        ConfigError."""
        hf = config_of_weights(self.hf_path, self.checkpoint_path)
        return family_of_shape(shape) if hf is None else family_of(hf)


class DataSection(Section):
    """Prompts and tokenizer."""

    prompts: HubPaths | None = key(
        "contents",
        None,
        "training prompts: a .jsonl or .parquet file, a folder of such files, ORG/NAME[:SPLIT]"
        "[@REVISION] of the Hub, or a list of these; required to train",
    )
    weights: Weights | None = shapes(
        None,
        "the share of each file of data.prompts in the prompts of a step, up to a common factor; "
        "null: in proportion to the number of its prompts",
    )
    eval_prompts: HubPaths | None = key(
        "shown", None, "held-out prompts, in a form of data.prompts"
    )
    tokenizer: HubPath = key("contents", ..., TOKENIZER)
    format: Literal["gsm8k", "math", "dapo", "apps"] | None = shapes(None, FORMAT)
    prompt_field: Text = shapes(
        "prompt", "the field that holds the prompt, a string or messages; a.b: field b of object a"
    )
    answer_field: Text | None = shapes(
        "answer", "the field that holds the right answer; null: the prompts have no answers"
    )
    template: Text | None = shapes(None, TEMPLATE)
    system_prompt: Text | None = shapes(None, SYSTEM_PROMPT)
    id_field: Text | None = harmless(
        "id", "the field with the id of a row; null, or no such field: the id is file name and line"
    )
    max_prompt_tokens: Positive | None = shapes(
        None, "longest prompt; null: model.max_sequence_length - rollout.max_response_tokens"
    )
    chat_template: bool = shapes(
        False, "a string prompt becomes a user message; messages always use the template"
    )
    chat_template_options: dict[str, Any] = shapes({}, "variables of the tokenizer's chat template")
    shuffle: bool = shapes(True, "a new order in every epoch, from training.seed")
    selection: SelectionSection = Field(default_factory=SelectionSection)


class RolloutSection(Section):
    """How responses are sampled."""

    engine: Literal["megatron", "vllm"] = shapes(
        "megatron", "what generates the responses: the trained model itself, or vLLM servers"
    )
    group_size: Positive = shapes(8, "number of responses to each prompt")
    prompts_per_step: Positive = shapes(16, "number of prompts of a step, over all ranks")
    max_response_tokens: Positive = shapes(
        32, "largest length of a response, in tokens; of an episode: its turns and the text between"
    )
    temperature: float = shapes(1.0, "sampling temperature; 1.0: the model's distribution", gt=0)
    top_p: float = shapes(1.0, "nucleus sampling; 1.0: off", gt=0, le=1)
    top_k: NotNegative = shapes(0, "sample from the k most likely tokens; 0: off")
    stop: list[Text] = shapes([], "texts, or special tokens, that end a response")
    batch_size: Positive | None = harmless(
        None, "sequences that a rank decodes together; when one ends, the next starts; null: all"
    )
    dynamic_sampling: bool = shapes(
        False,
        "train only on groups whose shaped rewards differ, and take further prompts in place of "
        "the others",
    )
    max_refills: NotNegative = shapes(4, "additional batches of prompts for a step, at most")
    max_staleness: NotNegative | None = shapes(
        None,
        "most steps between the weights that generate a token and the trained policy; with n, "
        "servers generate responses of up to n later steps while the policy trains; null: 1 with "
        "engine = vllm, else 0",
    )
    kv_after_update: Literal["recompute", "keep"] = shapes(
        "recompute",
        "the key/value cache of responses in progress after a weight update: recompute it with the "
        "new weights, or keep the cache that the old weights computed",
    )
    vllm: VllmSection = Field(default_factory=VllmSection)

    @property
    def staleness(self) -> int:
        """The value of `max_staleness` with its default filled in."""
        return int(self.engine == "vllm") if self.max_staleness is None else self.max_staleness


SINGLE_TURN = "single_turn"  # a prompt and one response
NEEDS_PYTHON = "environment.verifiers needs the interpreter that has the package verifiers"


class EnvironmentSection(Section):
    """What the policy acts in."""

    name: Text = shapes(SINGLE_TURN, "name of a built-in environment")
    import_path: ImportPath | None = key(
        "code", None, "a custom environment, package.module:Class; replaces name"
    )
    verifiers: Text | None = shapes(None, "a taskset of the package verifiers; replaces name")
    python: Text | None = harmless(None, "Python interpreter of the environment that has verifiers")
    options: dict[str, Any] = shapes({}, "keyword arguments of the environment")
    max_turns: Positive = shapes(8, "largest number of turns of the policy in an episode")

    @property
    def has_episodes(self) -> bool:
        """Whether a response may have several turns."""
        return self.name != SINGLE_TURN or bool(self.import_path or self.verifiers)


class RewardSection(Section):
    """How responses are rewarded."""

    name: Text = shapes("exact_match", "name of a built-in reward")
    import_path: ImportPath | None = key(
        "code", None, "a custom reward function, package.module:function; replaces name"
    )
    options: dict[str, Any] = shapes({}, "keyword arguments of the reward")
    weights: dict[str, float] = shapes(
        {},
        "weight of each part, by name, if the reward returns parts; 1.0 for parts without a weight",
    )
    workers: NotNegative | None = harmless(
        None,
        "number of processes, of each rank or of the rollout service, that call the reward; 0: the "
        "rank or service calls it itself; null: 4 for code, 1 for math, else 0",
    )
    timeout_seconds: float = harmless(
        60.0,
        "time limit of a call in a worker, and of a request to a teacher or a reward model",
        gt=0,
    )
    memory_mb: Positive = harmless(8192, "memory limit of a worker, in MiB of data")
    retries: NotNegative = harmless(
        2, "how often a call is repeated if it raises an error or ends its worker"
    )
    on_failure: Literal["stop", "drop_group"] = harmless(
        "stop",
        "if a call and all its repetitions fail: save the run and end it (stop), or leave out the "
        "prompt's group (drop_group)",
    )
    scale: float = shapes(1.0, "factor for all rewards; applied first", gt=0)
    clip: float | None = shapes(
        None, "each turn's reward, after scale, is clipped to [-clip, clip]; null: none", gt=0
    )
    overlong_buffer: Positive | None = shapes(
        None, "tokens before max_response_tokens over which a length penalty grows; null: none"
    )
    overlong_penalty: float = shapes(
        1.0,
        "largest length penalty: of a response that fills the whole buffer, or is cut off",
        gt=0,
    )
    repetition_penalty: float = shapes(
        0.0,
        "this number times the repeated share of the response is subtracted from the reward; "
        "0.0: off",
        ge=0,
    )
    repetition_words: Positive = shapes(
        3, "number of words in a row that count as repeated if they occur earlier in the response"
    )
    model: RewardModelSection = Field(default_factory=RewardModelSection)


class RoutingSection(Section):
    """Which experts the new policy uses."""

    replay: Literal["off", "r2", "r3"] = shapes(
        "off", "Routing Replay of the old policy's experts (r2) or of the rollout's (r3)"
    )
    reference_replay: Literal["off", "r2", "r3"] = shapes(
        "off", "Routing Replay for the reference policy, whatever the value of replay"
    )
    store_on_host: bool = harmless(False, "keep routes in host memory until their micro-batch")
    volatility: bool = harmless(False, "measure how many experts change during a step, by layer")
    rollout_noise: float = shapes(
        0.0,
        "standard deviation of Gaussian noise on the scores of the routers during rollouts; it "
        "imitates an engine that chooses other experts than the trainer; 0.0: no noise",
        ge=0,
    )

    @property
    def modes(self) -> frozenset[str]:
        """The replay modes in use, by the policy or the reference policy: r2, r3, both or none."""
        return frozenset({self.replay, self.reference_replay} - {"off"})


class OptimizerSection(Section):
    """AdamW and its learning rate."""

    learning_rate: float = shapes(1e-6, "learning rate after the warm-up", gt=0)
    min_learning_rate: float = shapes(0.0, "the learning rate at the end of the decay", ge=0)
    warmup_steps: NotNegative = shapes(0, "steps of linear warm-up")
    decay: Literal["constant", "linear", "cosine"] = shapes(
        "constant", "curve of the learning rate from the warm-up to training.steps"
    )
    weight_decay: float = shapes(0.1, "decoupled weight decay", ge=0)
    beta1: float = shapes(0.9, "decay rate of the first moment", ge=0, lt=1)
    beta2: float = shapes(0.95, "decay rate of the second moment", ge=0, lt=1)
    epsilon: float = shapes(1e-8, "added to Adam's denominator", gt=0)
    clip_grad: float = shapes(1.0, "largest global gradient norm; 0: no clipping", ge=0)
    megatron: dict[str, Any] = shapes({}, "fields of the installed OptimizerConfig")


class RunSection(Section):
    """The keys of the section `training` that all stages have."""

    seed: Seed = shapes(1, "seed of initial weights, data order and sampling")
    precision: Precision = shapes(
        "bf16",
        "precision of weights and activations; fp64 is for `verify` and cannot train; fp8-delayed, "
        "fp8-blockwise and mxfp8: matrix products in FP8 by Transformer Engine, everything else "
        "as in bf16",
    )
    micro_batch_tokens: Positive = harmless(4096, "tokens of a micro-batch; bounds the activations")
    evaluation_interval: NotNegative = harmless(
        0, "number of steps between evaluations; 0: at start and end only"
    )
    recompute: Literal["none", "full", "selective"] = harmless(
        "none", "which activations the backward pass computes again, to save memory"
    )
    hang_timeout_seconds: NotNegative = harmless(
        1200,
        "time without progress of a rank after which all ranks write their stacks and the run "
        "ends; 0: never",
        le=MOST_SECONDS,
    )
    stop_margin_seconds: NotNegative = harmless(
        300,
        "a run in a Slurm job is saved and stops when the job's remaining time is less than this "
        "number plus the time of the longest step so far",
    )
    max_restarts_without_progress: NotNegative = harmless(
        3,
        "largest number of restarts of a Slurm job at the same point of the run; the next restart "
        "ends the job",
    )


# The seed of a sample holds the step and the number of rollbacks in 32 bits: see
# `ReinforcementLoop._draw_number`.
STEP_BITS = 24
Rollbacks = Annotated[int, Field(ge=0, lt=1 << (32 - STEP_BITS))]


class TrainingSection(RunSection):
    """The run itself."""

    steps: NotNegative = key(
        "steps", 100, "number of RL steps; 0: only evaluate, on data.eval_prompts"
    )
    packing: bool = harmless(
        True, "pack sequences into one row; false: a padded row for each sequence"
    )
    share_prompts: bool | None = harmless(None, SHARE_PROMPTS)
    evaluation_prompts: Positive = harmless(256, "largest number of data.eval_prompts to use")
    keep_step_inputs: NotNegative = harmless(
        0,
        "number of last steps whose inputs stay in the run folder, for `verify RUN --step N`; 0: "
        "none",
    )
    phases: list[Phase] = harmless([], PHASES)
    on_collapse: Literal["warn", "stop", "rollback"] = harmless(
        "warn",
        "what the run does when its policy collapses (docs/campaigns.md): it prints one "
        "warning (warn), saves and ends (stop), or goes back to the last healthy checkpoint and "
        "continues with other samples and prompts (rollback)",
    )
    max_rollbacks: Rollbacks = harmless(
        2, "largest number of rollbacks of a run; the next collapse ends the run, as with stop"
    )


class WindowSection(Section):
    """A window of dates. Only rows whose date is in the window are problems of the suite."""

    field: Text | None = harmless(None, "the field with the date, as 2025-01-31…; null: all rows")
    first: Date | None = harmless(None, "the first day, month or year, as 2025-01; null: any")
    last: Date | None = harmless(
        None, "the last day, month or year, which is included as a whole; null: any"
    )


class SuiteSection(Section):
    """Problems, how responses to them are generated, and how the responses are judged."""

    prompts: HubPaths = harmless(
        ...,
        "the problems, as data.prompts: a file, a folder, a name of the Hub, or a list of these",
    )
    template: Text | None = harmless(None, TEMPLATE)
    system_prompt: Text | None = harmless(None, SYSTEM_PROMPT)
    format: Literal["gsm8k", "math", "dapo", "apps"] | None = harmless(None, FORMAT)
    prompt_field: Text = harmless("prompt", "the field that holds the prompt, as data.prompt_field")
    answer_field: Text | None = harmless(
        "answer", "the field of the right answer; null: no answers"
    )
    id_field: Text | None = harmless("id", "the field with the id of a row, as data.id_field")
    chat_template: bool | None = harmless(
        None, "a string prompt becomes a user message; null: as data.chat_template"
    )
    filter: WindowSection = Field(default_factory=WindowSection)
    limit: Positive | None = harmless(None, "number of problems, from the first; null: all")
    reward: RewardSection = Field(default_factory=RewardSection)
    samples: Positive = harmless(1, "responses to each problem: k of mean@k, pass@k and maj@k")
    temperature: float = harmless(1.0, "sampling temperature; 0.0: greedy", ge=0)
    top_p: float = harmless(1.0, "nucleus sampling; 1.0: off", gt=0, le=1)
    top_k: NotNegative = harmless(0, "sample from the k most likely tokens; 0: off")
    max_response_tokens: Positive | None = harmless(
        None, "largest length of a response; null: as rollout.max_response_tokens"
    )
    correct_at: float | None = harmless(
        None, "a response with at least this reward is correct; null: as evaluation.correct_at"
    )
    failed: Literal["left_out", "wrong"] = harmless(
        "left_out",
        "how a response counts if its reward fails and reward.on_failure = drop_group: its problem "
        "is left out, or the response is wrong",
    )


class EvaluationSection(Section):
    """How held-out responses are judged."""

    correct_at: float = harmless(
        1.0, "evaluation/accuracy is the share of held-out responses with at least this reward"
    )
    suites: dict[SuiteName, SuiteSection] = key(
        "shown",
        {},
        "evaluations by name, each with the keys below; the text FILE.yaml or FILE.yaml:NAME "
        "instead takes the keys from a file of suites",
    )
    interval: NotNegative = harmless(
        0, "number of steps between evaluations of the suites; 0: at start and end only"
    )


class CheckpointSection(Section):
    """Saving and resuming."""

    interval: NotNegative = harmless(
        0,
        "number of steps between checkpoints; one more is saved at the end, and when the run is "
        "told to stop; 0: no checkpoints",
    )
    keep_last: Positive | None = harmless(3, "number of newest checkpoints to keep; null: all")
    keep_best: NotNegative = harmless(0, "number of best checkpoints to keep, by best_metric")
    keep_every: NotNegative = harmless(
        0, "also keep checkpoints of steps that are multiples of this number; 0: none"
    )
    best_metric: Text = harmless("evaluation/accuracy", "metric of metrics.jsonl; higher is better")
    asynchronous: bool = harmless(False, "write during training, from a copy in host memory")


class RecordSection(Section):
    """Where the record of the run goes."""

    dir: Text | None = harmless(None, "the run folder; null: runs/<config file's name>")
    trackers: list[Literal["tensorboard", "wandb", "mlflow"]] = harmless(
        [], "trackers that get the metrics; metrics.jsonl always has them"
    )
    plots: bool = harmless(True, "write plots/*.png at the end of the run")


class LoggingSection(RecordSection):
    """Where the record of the run goes."""

    samples_per_step: NotNegative = harmless(2, "number of responses of each step in samples.jsonl")


class RunConfig(Section):
    """The part of the configuration that all stages have: a model on a layout."""

    phase: ClassVar[str]  # the stage's name in metrics and checkpoints
    # The keys of the data section for training inputs and for evaluation inputs.
    inputs: ClassVar[tuple[str, str]]
    input_suffix: ClassVar[str] = ""  # suffix that the configured paths of input files lack

    if TYPE_CHECKING:  # each stage has sections of its own with these names
        data: Any
        training: Any

    model: ModelSection = Field(default_factory=ModelSection)
    parallel: ParallelSection = Field(default_factory=ParallelSection)

    def input_files(self) -> dict[str, list[str]]:
        """Return the input files except the tokenizer, by the key that names them."""
        named = {f"data.{name}": self.data.known(name) for name in self.inputs}
        return {
            key: [path + self.input_suffix for path in ([given] if type(given) is str else given)]
            for key, given in named.items()
            if given
        }

    def layout(self) -> Layout:
        """The parallel section in short form."""
        return Layout(**{short: getattr(self.parallel, key) for short, key in LAYOUT_KEYS.items()})

    def evaluated_every(self, metric: str) -> tuple[str, int]:
        """The key that says how often a metric "evaluation/…" is measured, and the value of this
        key."""
        return "training.evaluation_interval", self.training.evaluation_interval

    def world_size_hint(self) -> int:
        """Return the layout's number of ranks; the smallest possible one if dp is null."""
        return self.layout().world_size

    def resolved_model(self) -> ModelShape:
        """Return the starting shape with the keys of `model` applied. Sizes that neither this shape
        nor these keys set get TransformerConfig's defaults. Raises ConfigError like
        `starting_shape`."""
        start = self.model.starting_shape()
        sizes = {name: getattr(self.model, name) for name in WHOLE_MODEL_KEYS}
        return shape_of(start, self.model.megatron, **sizes)


def suite_key(name: str) -> str:
    """Return the key of a suite; it also identifies the suite's prompts among a run's inputs."""
    return f"evaluation.suites.{name}"


class Config(RunConfig):
    """The configuration of an RL run."""

    phase: ClassVar[str] = "rl"
    inputs: ClassVar[tuple[str, str]] = ("prompts", "eval_prompts")

    data: DataSection
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    environment: EnvironmentSection = Field(default_factory=EnvironmentSection)
    reward: RewardSection = Field(default_factory=RewardSection)
    objective: ObjectiveSection = Field(default_factory=ObjectiveSection)
    routing: RoutingSection = Field(default_factory=RoutingSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    training: TrainingSection = Field(default_factory=TrainingSection)
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    logging: LoggingSection = Field(default_factory=LoggingSection)

    def max_prompt_tokens(self) -> int:
        """data.max_prompt_tokens with its default filled in."""
        if self.data.max_prompt_tokens is not None:
            return self.data.max_prompt_tokens
        return self.resolved_model().max_sequence_length - self.rollout.max_response_tokens

    def input_files(self) -> dict[str, list[str]]:
        """Return the input files as for any run, and the prompt files of the suites."""
        suites = (self.evaluation.known("suites") or {}).items()
        named = {suite_key(name): suite.known("prompts") or [] for name, suite in suites}
        return {**super().input_files(), **named}

    def evaluated_every(self, metric: str) -> tuple[str, int]:
        """Return the key and its value; the key of a suite's metric is evaluation.interval."""
        if metric.split("/")[1] in self.evaluation.suites:
            return "evaluation.interval", self.evaluation.interval
        return super().evaluated_every(metric)

    def suite_response_tokens(self, name: str) -> int:
        """max_response_tokens of a suite with its default filled in."""
        return self.evaluation.suites[name].max_response_tokens or self.rollout.max_response_tokens
