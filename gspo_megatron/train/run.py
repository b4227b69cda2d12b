"""One rank of a training run, from an already checked configuration."""

from __future__ import annotations

from gspo_megatron.config import Config, resolve_parallel
from gspo_megatron.data.encode import encode_prompts
from gspo_megatron.data.prompts import load_prompts
from gspo_megatron.data.tokenizers import Tokenizer, load_tokenizer
from gspo_megatron.errors import ConfigError, DataError
from gspo_megatron.models.build import build_policy
from gspo_megatron.platform.groups import set_up_model_parallel, start_processes, stop_processes
from gspo_megatron.rewards.registry import Reward, get_reward
from gspo_megatron.rollout.megatron import MegatronEngine
from gspo_megatron.train.experience import ExperienceCollector
from gspo_megatron.train.loop import Job, Prompts, ReinforcementLoop, warm_start
from gspo_megatron.train.record import RunRecord
from gspo_megatron.train.schedule import MicroBatchBuilder
from gspo_megatron.types import Prompt


def run_training(config: Config) -> None:
    """Train as this process's rank of the run; every rank calls it with the same configuration,
    which has passed `check_config`.

    Raises UserError for what the user can mend: prompt files, tokenizer, reward. All input is read
    before any process group exists.
    """
    tokenizer = load_tokenizer(config.data.tokenizer)
    prompts = read_prompts(config, tokenizer)
    reward = get_reward(config.reward.name, config.reward.import_path, config.reward.options)
    try:
        job = assemble(config, tokenizer, prompts, reward)
        try:
            warm_start(job)
            ReinforcementLoop(job).run()
            job.record.finish()
        finally:
            job.record.close()
    finally:
        stop_processes()


def assemble(config: Config, tokenizer: Tokenizer, prompts: Prompts, reward: Reward) -> Job:
    """Join the other ranks and build this rank's part of everything."""
    ranks = start_processes()
    parallel = resolve_parallel(config, ranks.world_size)
    set_up_model_parallel(parallel, config.training.seed)
    policy = build_policy(config, parallel, vocab_size(config, tokenizer))
    engine = MegatronEngine(
        policy,
        pad_id=tokenizer.pad_id,
        eos_id=tokenizer.eos_id,
        batch_size=config.rollout.batch_size,
        decode=tokenizer.decode,
    )
    return Job(
        config=config,
        policy=policy,
        tokenizer=tokenizer,
        prompts=prompts,
        engine=engine,
        collector=ExperienceCollector(engine, tokenizer, reward, config.objective, ranks.device),
        builder=MicroBatchBuilder(policy, tokenizer.pad_id, config.rollout.temperature),
        record=RunRecord(config, ranks.is_main),
    )


def read_prompts(config: Config, tokenizer: Tokenizer) -> Prompts:
    """All prompts of a run, encoded; raises DataError with file and line of what cannot be used."""
    limit = config.max_prompt_tokens()

    def read(path: str) -> list[Prompt]:
        loaded = load_prompts(path, config.data.prompt_field, config.data.answer_field)
        return encode_prompts(loaded, tokenizer, limit, config.data.chat_template)

    assert config.data.prompts is not None, "check_config(for_training=True) comes first"
    train = read(config.data.prompts)
    evaluation = read(config.data.eval_prompts) if config.data.eval_prompts else []
    start = config.training.warm_start
    supervised = read(start.prompts) if start.prompts else train
    if start.steps:
        _check_answers_fit(supervised, tokenizer, config)
    return Prompts(train, evaluation[: config.training.evaluation_prompts], supervised)


def vocab_size(config: Config, tokenizer: Tokenizer) -> int:
    """The model's vocabulary, which must hold every id of the tokenizer."""
    wanted = config.resolved_model().vocab_size
    if wanted is None:
        return tokenizer.vocab_size
    if wanted < tokenizer.vocab_size:
        raise ConfigError(
            [
                f"model.vocab_size = {wanted}: the tokenizer {config.data.tokenizer} has "
                f"{tokenizer.vocab_size} ids; legal: {tokenizer.vocab_size} or more"
            ]
        )
    return wanted


def _check_answers_fit(prompts: list[Prompt], tokenizer: Tokenizer, config: Config) -> None:
    longest = config.resolved_model().max_sequence_length
    for prompt in prompts:
        length = len(prompt.token_ids) + len(tokenizer.encode(prompt.answer)) + 1
        if length > longest:
            raise DataError(
                f"{prompt.source}: prompt and answer have {length} tokens; the model holds "
                f"{longest} (model.max_sequence_length)"
            )
