"""Plays episodes with a model. Generation and scoring are as in a step; nothing is trained or
saved."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from gspo_megatron.checkpoint.start import load_initial_weights
from gspo_megatron.config import Config, resolve_parallel
from gspo_megatron.data.inputs import model_vocab_size, read_inputs
from gspo_megatron.environments.registry import tools_of
from gspo_megatron.models.build import build_policy
from gspo_megatron.platform.groups import (
    patience_minutes,
    set_up_model_parallel,
    start_processes,
    stop_processes,
)
from gspo_megatron.rewards.registry import reward_of
from gspo_megatron.rl.run import in_process_collector
from gspo_megatron.rollout.engine import RolloutRequest, Sampling


def play(config: Config, episodes: int) -> list[dict[str, Any]]:
    """Play one episode for each of the first `episodes` prompts. If there are fewer prompts, repeat
    them.

    Every rank calls this function. The main rank gets a record for each episode, in the form of
    evaluation.jsonl, and the other ranks get an empty list. Raises UserError.
    """
    inputs, reward = read_inputs(config, tools_of(config)), reward_of(config.reward)
    patience = patience_minutes(config.training.hang_timeout_seconds)
    ranks = start_processes(patience)
    try:
        parallel = resolve_parallel(config, ranks.world_size)
        set_up_model_parallel(parallel, config.training.seed, patience)
        policy = build_policy(config, parallel, model_vocab_size(config, inputs.tokenizer))
        policy.set_padding_token(load_initial_weights(config, policy))
        collector = in_process_collector(config, inputs, policy, reward, ranks.device)
        with closing(collector):
            collector.scorer.teachers = None  # nothing is trained, so nobody needs their answers
            count = len(inputs.files[prompts_key(config)])
            rows = [number % count for number in range(episodes)]
            request = _request(config, rows)
            group = collector.sample(request).group
            records = collector.records(request, group, config.evaluation.correct_at)
    finally:
        stop_processes()
    return [record for _, record in records]


def prompts_key(config: Config) -> str:
    """Return the configuration key of the prompts to play."""
    return "data.prompts" if config.data.prompts else "data.eval_prompts"


def _request(config: Config, rows: list[int]) -> RolloutRequest:
    rollout, key = config.rollout, prompts_key(config)
    sampling = Sampling.of(rollout)
    return RolloutRequest(
        "play_00000000", key, rows, 0, 1, sampling, config.training.seed, version=0
    )
