"""The parts of a run that are built from a configuration and its input files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gspo_megatron.data.inputs import read_inputs
from gspo_megatron.objectives import build_objective
from gspo_megatron.platform.groups import stop_processes
from gspo_megatron.rewards.registry import get_reward
from gspo_megatron.rl.loop import ReinforcementLoop
from gspo_megatron.rl.run import assemble
from tests.unit.data.corpora import make_tokenizer, write_jsonl
from tests.unit.models.one_rank import tiny_config

GAME = """
class Game:
    gives_rewards = True

    async def rollout(self, client, task):
        await client.generate()
"""


def test_the_schedule_counts_updates_and_responses_end_at_all_end_tokens_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tokenizer(tmp_path / "tokenizer")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "game_of_test_run.py").write_text(GAME)
    prompts = write_jsonl(tmp_path / "prompts.jsonl", ["kalo"] * 4, "prompt")
    config = tiny_config(
        data={"tokenizer": str(folder), "prompts": str(prompts), "answer_field": "prompt"},
        logging={"dir": str(tmp_path / "run")},
        environment={"import_path": "game_of_test_run:Game"},
        optimizer={"warmup_steps": 3},
        objective={"mini_batches": 2},
    )
    reward = get_reward("exact_match", None, {})
    try:
        run = assemble(config, read_inputs(config), reward, build_objective(config.objective, 8))
        run.logger.close()
        schedule = ReinforcementLoop(run).trainer.scheduler
        tokenizer = run.inputs.tokenizer
        end_ids, found = run.collector.source.engine._split_stops(
            ("<|doc|>", "<sep>", "<|doc|><sep>")
        )
    finally:
        stop_processes()
    # A setting that nothing reads appears as a comment, not as a value of the run.
    resolved = (tmp_path / "run" / "config.resolved.yaml").read_text()
    assert "  # name: not read; the environment gives the rewards\n" in resolved
    assert "  # name: not read; environment.import_path replaces it\n" in resolved
    assert "single_turn" not in resolved and "exact_match" not in resolved
    # The schedule counts updates, and the configuration counts steps.
    assert schedule.lr_warmup_steps == 3 * 2
    # <|doc|> is a special token. <sep> is an ordinary token of text, so it does not end a response.
    assert end_ids.tolist() == [tokenizer.eos_id, 7, tokenizer.symbol_id("<|doc|>")]
    document, separator = (tokenizer.symbol_id(symbol) for symbol in ("<|doc|>", "<sep>"))
    plain, mixed = found
    assert plain.end([separator], searched=0) == 1
    assert mixed.end([separator, document, separator], searched=0) == 3
