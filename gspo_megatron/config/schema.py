"""Every key of an RL configuration: its type, its default, its limits and what it means.

What several keys get wrong together is in rules.py; pre-training and fine-tuning are in stages.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from gspo_megatron.config.lora import LoraSection
from gspo_megatron.config.objectives import ObjectiveSection
from gspo_megatron.config.parallel import LAYOUT_KEYS, Layout, expand_layout
from gspo_megatron.config.precision import Precision
from gspo_megatron.config.section import (
    SYSTEM_PROMPT,
    TEMPLATE,
    Date,
    ImportPath,
    NotNegative,
    Paths,
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
from gspo_megatron.families import PRESETS, Family, family_of, family_of_shape, preset_of_folder
from gspo_megatron.families.model_shape import (
    WHOLE_MODEL_KEYS,
    ModelPreset,
    ModelShape,
    checkpoint_model_file,
    preset_of_checkpoint,
    shape_of,
)
from gspo_megatron.files import parse_json


class ModelSection(Section):
    """What is trained."""

    preset: Literal[tuple(PRESETS)] | None = shapes(  # ty: ignore[invalid-type-form]
        None,
        "the named shape to start from; null: the shape that hf_path or checkpoint_path has, or "
        "tiny without them",
    )
    hf_path: Text | None = shapes(None, "Hugging Face folder of starting weights; null: random")
    checkpoint_path: Text | None = shapes(
        None,
        "a checkpoint of gspo-megatron with the weights to start from; for a run folder, or its "
        "checkpoints folder, the newest one; null: random weights",
    )
    backend: Literal["auto", "torch_native", "transformer_engine"] = shapes(
        "auto",
        "layer implementation; auto takes Transformer Engine on a GPU that has it, in bf16 and FP8",
    )
    vocab_size: Positive | None = shapes(None, "null: the preset's, else the tokenizer's size")
    max_sequence_length: Positive | None = shapes(
        None, "prompt and response together, in tokens; null: the preset's"
    )
    rotary_base: float | None = shapes(None, "of the rotary embedding; null: the preset's", gt=0)
    tie_embeddings: bool | None = shapes(None, "one input and output embedding; null: the preset's")
    megatron: dict[str, Any] = shapes({}, "fields of TransformerConfig, which replace the preset's")
    lora: LoraSection = Field(default_factory=LoraSection)

    @model_validator(mode="before")
    @classmethod
    def _default_preset(cls, values: Any) -> Any:
        """Without weights to take the shape from, a resolved configuration names its preset."""
        sources = ("preset", "hf_path", "checkpoint_path")
        if isinstance(values, dict) and all(values.get(name) is None for name in sources):
            return {**values, "preset": "tiny"}
        return values

    def starting_shape(self) -> ModelPreset:
        """The model before the other keys replace parts of it. Raises ConfigError for its file."""
        if self.hf_path is not None:
            return preset_of_folder(self.hf_path)
        if self.preset is None and self.checkpoint_path is not None:
            return preset_of_checkpoint(self.checkpoint_path)
        return PRESETS[self.preset or "tiny"]

    def family(self, shape: ModelShape) -> Family:
        """The family whose names of tensors count: that of the weights' config.json, else one that
        has models of this shape. Raises ConfigError."""
        hf = None
        if self.hf_path is not None:
            hf = parse_json((Path(self.hf_path) / "config.json").read_bytes())
        elif self.checkpoint_path is not None:
            file = checkpoint_model_file(self.checkpoint_path)
            hf = None if file is None else parse_json(file.read_bytes()).get("hf")
        return family_of_shape(shape) if hf is None else family_of(hf)


class ParallelSection(Section):
    """Over how many ranks each axis is split."""

    layout: Text | None = harmless(None, 'short form of the sizes below, as in "tp=2,pp=2,ep=2"')
    tensor_model_parallel_size: Positive = harmless(1, "tp: shards of every matrix")
    pipeline_model_parallel_size: Positive = harmless(1, "pp: stages of the layer stack")
    virtual_pipeline_model_parallel_size: Positive | None = harmless(
        None, "vpp: chunks of layers in each stage (interleaved schedule)"
    )
    expert_model_parallel_size: Positive = harmless(1, "ep: shards of the set of experts")
    expert_tensor_parallel_size: Positive | None = harmless(
        None,
        "etp: shards of every expert's matrices; null: 1, where Megatron's own default is tp. "
        "Expert matrices are small: splitting them costs communication and saves nothing that ep "
        "does not save",
    )
    context_parallel_size: Positive = harmless(1, "cp: shards of every sequence")
    sequence_parallel: bool | None = harmless(None, "split activations over tp; null: on if tp > 1")
    data_parallel_size: Positive | None = harmless(
        None, "dp: copies of the model; null: world size / (tp * pp * cp)"
    )
    ddp: dict[str, Any] = harmless({}, "fields of the installed DistributedDataParallelConfig")

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

    prompts: Paths | None = key(
        "contents",
        None,
        "training prompts: a .jsonl or .parquet file, or a list of them; required to train",
    )
    weights: Weights | None = shapes(
        None,
        "the share of each file of prompts in what is drawn, up to a common factor; null: in "
        "proportion to its prompts",
    )
    eval_prompts: Paths | None = key("shown", None, "evaluation prompts, as data.prompts")
    tokenizer: Text = key("contents", ..., "a sentencepiece .model file or a Hugging Face folder")
    format: Literal["gsm8k", "math", "dapo", "apps"] | None = shapes(
        None, "a published dataset whose rows these are; replaces the next two keys"
    )
    prompt_field: Text = shapes(
        "prompt", "the field that holds the prompt, a string or messages; a.b: field b of object a"
    )
    answer_field: Text | None = shapes(
        "answer", "the field that holds the right answer; null: the prompts have no answers"
    )
    template: Text | None = shapes(None, TEMPLATE)
    system_prompt: Text | None = shapes(None, SYSTEM_PROMPT)
    id_field: Text | None = harmless(
        "id", "the field that identifies a row, where there is one; null: file name and line do"
    )
    max_prompt_tokens: Positive | None = shapes(
        None, "null: model.max_sequence_length - rollout.max_response_tokens"
    )
    chat_template: bool = shapes(
        False, "a prompt that is a string becomes a user message; messages use the template anyway"
    )
    chat_template_options: dict[str, Any] = shapes({}, "variables of the tokenizer's chat template")
    shuffle: bool = shapes(True, "a new order in every epoch, from training.seed")


class VllmSection(Section):
    """The vLLM servers of rollout.engine: vllm."""

    servers: NotNegative = harmless(
        0,
        "start this many servers: beside rank 0, or on a job's rollout nodes, as many on each; "
        "0: those of urls are running already",
    )
    urls: list[Text] = harmless(
        [], "running servers, as http://host:port; GSPO_SERVER_TOKEN has their token"
    )
    tensor_parallel_size: Positive = harmless(1, "GPUs of each server that is started")
    python: Text | None = harmless(
        None, "interpreter of the environment that has vLLM; null: the one that trains"
    )
    options: dict[str, Any] = harmless(
        {}, "further options of the servers that are started, as {max_num_seqs: 128}"
    )
    weight_transport: Literal["auto", "nccl", "disk"] = harmless(
        "auto",
        "how new weights get to the servers: nccl, from rank 0 to their workers (gloo on CPUs); "
        "disk, by a folder; auto: nccl on GPUs where the servers can",
    )
    weights_dir: Text | None = harmless(
        None,
        "folder for new weights on their way to the servers, which all machines of the run see; "
        "null: /dev/shm for servers beside rank 0, else the run folder",
    )
    restarts: NotNegative = harmless(
        3, "restarts of each server, and of the rollout service, before the run gives up"
    )
    update_seconds: Positive = harmless(
        600, "a server that takes longer for its start or for new weights is out"
    )
    silence_seconds: Positive = harmless(
        120, "a server that neither answers nor draws a token for this long is out"
    )


class RolloutSection(Section):
    """How responses are sampled."""

    engine: Literal["megatron", "vllm"] = shapes(
        "megatron", "what generates the responses: the model that is trained, or vLLM servers"
    )
    group_size: Positive = shapes(8, "responses to each prompt")
    prompts_per_step: Positive = shapes(16, "prompts of a step, over all ranks")
    max_response_tokens: Positive = shapes(
        32, "longer responses are cut off; of an episode: all its turns and what stands between"
    )
    temperature: float = shapes(1.0, "sampling temperature; 1.0: the model itself", gt=0)
    top_p: float = shapes(1.0, "nucleus sampling; 1.0: off", gt=0, le=1)
    top_k: NotNegative = shapes(0, "sample from the k most likely tokens; 0: off")
    stop: list[Text] = shapes([], "texts that end a response")
    batch_size: Positive | None = harmless(
        None,
        "sequences decoded together on a rank; when one ends, the next starts; null: all of them",
    )
    dynamic_sampling: bool = shapes(
        False,
        "train only on groups whose shaped rewards differ, and draw more prompts to replace the "
        "others",
    )
    max_refills: NotNegative = shapes(4, "additional batches of prompts a step may draw")
    max_staleness: NotNegative | None = shapes(
        None,
        "updates of the policy that a token may miss: servers draw the responses of so many later "
        "steps while the policy trains; null: 1 with engine = vllm, else 0",
    )
    kv_after_update: Literal["recompute", "keep"] = shapes(
        "recompute",
        "what responses under way go on with after new weights: keys and values that these make "
        "of their tokens, or those that the old weights left",
    )
    vllm: VllmSection = Field(default_factory=VllmSection)

    @property
    def staleness(self) -> int:
        """`max_staleness`, or what null means."""
        return int(self.engine == "vllm") if self.max_staleness is None else self.max_staleness


SINGLE_TURN = "single_turn"  # a prompt and one response


class EnvironmentSection(Section):
    """What the policy acts in."""

    name: Text = shapes(SINGLE_TURN, "a registered environment")
    import_path: ImportPath | None = key(
        "code", None, "a custom environment, package.module:Class; replaces name"
    )
    verifiers: Text | None = shapes(None, "a taskset of the package verifiers; replaces name")
    python: Text | None = harmless(None, "interpreter of the environment that has verifiers")
    options: dict[str, Any] = shapes({}, "keyword arguments of the environment")
    max_turns: Positive = shapes(8, "turns of the policy in an episode")

    @property
    def has_episodes(self) -> bool:
        """Whether the policy may act more than once."""
        return self.name != SINGLE_TURN or bool(self.import_path or self.verifiers)


class RewardSection(Section):
    """How responses are rewarded."""

    name: Text = shapes("exact_match", "a registered reward")
    import_path: ImportPath | None = key(
        "code", None, "a custom reward function, package.module:function; replaces name"
    )
    options: dict[str, Any] = shapes({}, "keyword arguments of the reward")
    weights: dict[str, float] = shapes(
        {}, "of the reward's parts, by name, where it returns parts; 1.0 for a part without weight"
    )
    workers: NotNegative | None = harmless(
        None,
        "processes of a rank, or of the rollout service, that call the reward; 0: it is called in "
        "the rank or service itself; null: 4 for code, 1 for math, else 0",
    )
    timeout_seconds: float = harmless(60.0, "of a call by a worker, before it is ended", gt=0)
    memory_mb: Positive = harmless(8192, "MiB of data that a worker may have")
    retries: NotNegative = harmless(
        2, "further calls of a reward whose call raises an error or ends its worker"
    )
    on_failure: Literal["stop", "drop_group"] = harmless(
        "stop",
        "and then: save the run and end it, or train on no response to that prompt",
    )
    scale: float = shapes(1.0, "applied first: rewards are multiplied by it", gt=0)
    clip: float | None = shapes(
        None,
        "applied next: each turn's reward is clipped to [-clip, clip]; null: no clipping",
        gt=0,
    )
    overlong_buffer: Positive | None = shapes(
        None,
        "the last tokens before max_response_tokens, each of which costs more than the one before; "
        "null: no such cost",
    )
    overlong_penalty: float = shapes(
        1.0,
        "applied last: what a response that uses the whole buffer, or is cut off, loses",
        gt=0,
    )


class RoutingSection(Section):
    """Which experts the new policy uses."""

    replay: Literal["off", "r2", "r3"] = shapes(
        "off", "replay the experts of the old policy (r2) or of the rollout (r3)"
    )
    reference_replay: Literal["off", "r2", "r3"] = shapes(
        "off", "the same for the reference policy, independently of replay"
    )
    store_on_host: bool = harmless(False, "keep routes in host memory until their micro-batch")
    volatility: bool = harmless(False, "measure how many experts change during a step, by layer")
    rollout_noise: float = shapes(
        0.0,
        "std of Gaussian noise on the routers' scores while rolling out: imitates an engine that "
        "chooses other experts than the trainer; 0.0: none",
        ge=0,
    )

    @property
    def modes(self) -> frozenset[str]:
        """The replay modes in use, by the policy or the reference policy: r2, r3, both or none."""
        return frozenset({self.replay, self.reference_replay} - {"off"})


class OptimizerSection(Section):
    """AdamW and its learning rate."""

    learning_rate: float = shapes(1e-6, "the peak", gt=0)
    min_learning_rate: float = shapes(0.0, "the learning rate at the end of the decay", ge=0)
    warmup_steps: NotNegative = shapes(0, "steps of linear warm-up")
    decay: Literal["constant", "linear", "cosine"] = shapes(
        "constant", "after the warm-up, until training.steps"
    )
    weight_decay: float = shapes(0.1, "decoupled weight decay", ge=0)
    beta1: float = shapes(0.9, "decay rate of the first moment", ge=0, lt=1)
    beta2: float = shapes(0.95, "decay rate of the second moment", ge=0, lt=1)
    epsilon: float = shapes(1e-8, "added to Adam's denominator", gt=0)
    clip_grad: float = shapes(1.0, "largest global gradient norm; 0: no clipping", ge=0)
    megatron: dict[str, Any] = shapes({}, "fields of the installed OptimizerConfig")


class RunSection(Section):
    """What a run of any stage needs to know."""

    seed: Seed = shapes(1, "of weights, data order and sampling")
    precision: Precision = shapes(
        "bf16",
        "of weights and activations; fp64 is for `verify` and cannot train; fp8-delayed, "
        "fp8-blockwise and mxfp8: matrix products in FP8 by Transformer Engine, everything else "
        "as in bf16",
    )
    micro_batch_tokens: Positive = harmless(4096, "tokens of a micro-batch; bounds the activations")
    evaluation_interval: NotNegative = harmless(
        0, "steps between evaluations; 0: at start and end only"
    )
    recompute: Literal["none", "full", "selective"] = harmless(
        "none", "activations recomputed in the backward pass to save memory"
    )
    hang_timeout_seconds: NotNegative = harmless(
        1200,
        "a rank without progress for this long ends the run, and the stacks of every rank are "
        "written; 0: never",
    )
    stop_margin_seconds: NotNegative = harmless(
        300,
        "the run is saved and stops when a Slurm job has less time left than this and the longest "
        "step so far together",
    )
    idle_restarts: NotNegative = harmless(
        3, "restarts of a Slurm job at the same point of the run; one more ends it"
    )


class TrainingSection(RunSection):
    """The run itself."""

    steps: NotNegative = key(
        "steps", 100, "RL steps: roll out, score, update; 0: evaluate only, on data.eval_prompts"
    )
    packing: bool = harmless(True, "sequences end to end in a row; false: a padded row each")
    evaluation_prompts: Positive = harmless(256, "use at most this many of data.eval_prompts")
    dump_batches: NotNegative = harmless(
        0,
        "keep the inputs of this many last steps in the run folder, for `verify RUN --step N`; "
        "0: none",
    )


class WindowSection(Section):
    """Which rows of a suite are problems: those with a date in a window."""

    field: Text | None = harmless(None, "the field that holds the date, as 2025-01-31…; null: all")
    first: Date | None = harmless(None, "the first day, month or year, as 2025-01; null: any")
    last: Date | None = harmless(None, "the last day, month or year, the whole of it; null: any")


class SuiteSection(Section):
    """Problems, how responses to them are drawn, and how these are judged."""

    prompts: Paths = harmless(..., "the problems: a .jsonl or .parquet file, or a list of them")
    template: Text | None = harmless(None, TEMPLATE)
    system_prompt: Text | None = harmless(None, SYSTEM_PROMPT)
    format: Literal["gsm8k", "math", "dapo", "apps"] | None = harmless(
        None, "a published dataset whose rows these are; replaces the next two keys"
    )
    prompt_field: Text = harmless("prompt", "the field that holds the prompt, as in data")
    answer_field: Text | None = harmless("answer", "the field that holds the right answer; or null")
    id_field: Text | None = harmless("id", "the field that identifies a row, as in data")
    chat_template: bool | None = harmless(
        None, "a prompt that is a string becomes a user message; null: as data.chat_template"
    )
    filter: WindowSection = Field(default_factory=WindowSection)
    limit: Positive | None = harmless(None, "only the first problems, so many; null: all")
    reward: RewardSection = Field(default_factory=RewardSection)
    samples: Positive = harmless(1, "responses to each problem: k of mean@k, pass@k and maj@k")
    temperature: float = harmless(1.0, "sampling temperature; 0.0: greedy", ge=0)
    top_p: float = harmless(1.0, "nucleus sampling; 1.0: off", gt=0, le=1)
    top_k: NotNegative = harmless(0, "sample from the k most likely tokens; 0: off")
    max_response_tokens: Positive | None = harmless(
        None, "longer responses are cut off; null: as rollout.max_response_tokens"
    )
    correct_at: float | None = harmless(
        None, "a response with at least this reward is correct; null: as evaluation.correct_at"
    )
    failed: Literal["left_out", "wrong"] = harmless(
        "left_out",
        "with reward.on_failure = drop_group, a problem whose reward fails: left out, or wrong",
    )


class EvaluationSection(Section):
    """How held-out responses are judged."""

    correct_at: float = harmless(
        1.0, "evaluation/accuracy is the share of held-out responses with at least this reward"
    )
    suites: dict[SuiteName, SuiteSection] = key(
        "shown",
        {},
        "evaluations by name, with the keys below; FILE.yaml, or FILE.yaml:NAME, in place of the "
        "keys takes them from a file of suites",
    )
    interval: NotNegative = harmless(
        0, "steps between evaluations of the suites; 0: at start and end only"
    )


class CheckpointSection(Section):
    """Saving and resuming."""

    interval: NotNegative = harmless(
        0,
        "steps between checkpoints; one more is saved at the end, and when the run is told to "
        "stop; 0: none",
    )
    keep_last: Positive | None = harmless(3, "keep this many of the newest; null: all")
    keep_best: NotNegative = harmless(0, "keep also this many with the highest `best_metric`")
    keep_every: NotNegative = harmless(0, "keep also those whose step is a multiple of it; 0: none")
    best_metric: Text = harmless("evaluation/accuracy", "of metrics.jsonl; higher is better")
    asynchronous: bool = harmless(False, "write during training, once a copy is in host memory")


class RecordSection(Section):
    """Where the record of the run goes."""

    dir: Text | None = harmless(None, "the run folder; null: runs/<config file's name>")
    trackers: list[Literal["tensorboard", "wandb", "mlflow"]] = harmless(
        [], "where metrics go besides metrics.jsonl"
    )
    plots: bool = harmless(True, "draw plots/*.png at the end")


class LoggingSection(RecordSection):
    """Where the record of the run goes."""

    samples_per_step: NotNegative = harmless(2, "responses a step kept in samples.jsonl")


class RunConfig(Section):
    """A model on a layout: what a run of any stage has."""

    # The keys of the data section with what the stage learns from, and what it evaluates on.
    inputs: ClassVar[tuple[str, str]]
    input_suffix: ClassVar[str] = ""  # what the paths of input files lack

    if TYPE_CHECKING:  # each stage has sections of its own with these names
        data: Any
        training: Any

    model: ModelSection = Field(default_factory=ModelSection)
    parallel: ParallelSection = Field(default_factory=ParallelSection)

    def input_files(self) -> dict[str, list[str]]:
        """The files that are read to train, by the key that names them; without the tokenizer."""
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
        """The key that says how often a metric "evaluation/…" is measured, and its value."""
        return "training.evaluation_interval", self.training.evaluation_interval

    def world_size_hint(self) -> int:
        """Ranks the layout asks for: the smallest possible number where dp is left open."""
        return self.layout().world_size

    def resolved_model(self) -> ModelShape:
        """The starting shape with the keys of `model` in place; sizes that both leave open get
        TransformerConfig's defaults. Raises ConfigError like `starting_shape`."""
        start = self.model.starting_shape()
        given = {name: getattr(self.model, name) for name in WHOLE_MODEL_KEYS}
        return shape_of(start, self.model.megatron, **given)


def suite_key(name: str) -> str:
    """The key of a suite, which also names its prompts among the inputs of a run."""
    return f"evaluation.suites.{name}"


class Config(RunConfig):
    """The configuration of an RL run."""

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
        """The files of any run, and the problems of the suites."""
        suites = (self.evaluation.known("suites") or {}).items()
        named = {suite_key(name): suite.known("prompts") or [] for name, suite in suites}
        return {**super().input_files(), **named}

    def evaluated_every(self, metric: str) -> tuple[str, int]:
        """The key and its value, as for any run; suites have an interval of their own."""
        if metric.split("/")[1] in self.evaluation.suites:
            return "evaluation.interval", self.evaluation.interval
        return super().evaluated_every(metric)

    def suite_response_tokens(self, name: str) -> int:
        """max_response_tokens of a suite with its default filled in."""
        return self.evaluation.suites[name].max_response_tokens or self.rollout.max_response_tokens
