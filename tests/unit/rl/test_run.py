"""The parts of a run that are built from a configuration and its input files."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest

from gspo_megatron.checkpoint import start as start_module
from gspo_megatron.checkpoint.resume import Start
from gspo_megatron.data.inputs import read_inputs
from gspo_megatron.errors import UserError
from gspo_megatron.objectives import build_objective
from gspo_megatron.observe import trackers
from gspo_megatron.observe.trackers import RunEnd, Tracker
from gspo_megatron.platform.groups import stop_processes
from gspo_megatron.rewards.registry import get_reward
from gspo_megatron.rl import run as run_module
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
        training={"micro_batch_tokens": 96},
    )
    reward = get_reward("exact_match", None, {})
    try:
        run = assemble(config, read_inputs(config), reward, build_objective(config.objective, 8))
        run.logger.close()
        schedule = ReinforcementLoop(run).trainer.scheduler
        tokenizer = run.inputs.tokenizer
        engine = run.collector.source.engine
        end_ids, found = engine._split_stops(("<|doc|>", "<sep>", "<|doc|><sep>"))
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
    assert engine.prefill_tokens == 96


@pytest.mark.parametrize("share", [None, False])
def test_a_step_computes_each_prompt_once(tmp_path: Path, share: bool | None) -> None:
    """Trainer and engine compute with one temperature, so their log-probs agree."""
    folder = make_tokenizer(tmp_path / "tokenizer")
    prompts = write_jsonl(tmp_path / "prompts.jsonl", ["kalo kalo", "mino kalo mino"], "prompt")
    config = tiny_config(
        data={"tokenizer": str(folder), "prompts": str(prompts), "answer_field": None},
        logging={"dir": str(tmp_path / "run")},
        rollout={
            "prompts_per_step": 2,
            "group_size": 4,
            "max_response_tokens": 5,
            "temperature": 0.5,
        },
        objective={"mini_batches": 1},
        training={"steps": 1, "share_prompts": share},
    )
    reward = get_reward("none", None, {})
    try:
        run = assemble(config, read_inputs(config), reward, build_objective(config.objective, 5))
        loop = ReinforcementLoop(run)
        with patch.object(run.builder, "build", wraps=run.builder.build) as build:
            metrics = loop.step(1)
        run.logger.close()
    finally:
        stop_processes()
    assert metrics["mismatch/max"] < 1e-5  # rounding in fp32
    (call,) = build.call_args_list
    members, tokens = call.args[:2]
    packed = run.builder.build(*call.args).packed
    whole = sum(len(tokens[number]) for number in members)
    assert list(members) == list(range(8))
    if share is False:
        assert packed.input_ids.numel() == whole
        return
    # All responses to a prompt but the first leave out the prompt, except for its last token. Every
    # response leaves out its own last token.
    lengths = [len(run.inputs.train[number].token_ids) for number in range(2)]
    assert min(lengths) > 2
    assert packed.input_ids.numel() == whole - 3 * sum(length - 1 for length in lengths) - 8


def test_trackers_are_told_of_a_failure_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run fails when its trackers are open, and its steps have not begun."""
    ends: list[RunEnd] = []
    tracker = Tracker(lambda step, metrics: None, ends.append)
    monkeypatch.setitem(trackers._TRACKERS, "mlflow", lambda run_dir, config: tracker)
    folder = make_tokenizer(tmp_path / "tokenizer")
    prompts = write_jsonl(tmp_path / "prompts.jsonl", ["kalo"] * 4, "prompt")
    config = tiny_config(
        data={"tokenizer": str(folder), "prompts": str(prompts), "answer_field": "prompt"},
        logging={"dir": str(tmp_path / "run"), "trackers": ["mlflow"]},
    )
    reward = get_reward("exact_match", None, {})

    def fail(*_: Any) -> None:
        raise UserError("no memory")

    for module, name in ((start_module, "load_starting_weights"), (run_module, "collector_of")):
        with monkeypatch.context() as patch, pytest.raises(UserError, match="no memory"):
            patch.setattr(module, name, fail)
            try:
                assemble(config, read_inputs(config), reward, build_objective(config.objective, 8))
            finally:
                stop_processes()
        (tmp_path / "run" / "metrics.jsonl").unlink()
    assert ends == [RunEnd.FAILED, RunEnd.FAILED]


MOMENTS = {"count": 3.0, "mean": 0.5, "squares": 1.0}


@pytest.mark.parametrize(
    ("state", "length", "moments"),
    [
        ({}, 9, {}),  # a phase with another reward model begins, so its moments begin anew
        (
            {"rollouts": {}},
            9,
            MOMENTS,
        ),  # in its first step, whose scores are in the moments
        ({"unevaluated": {}}, 8, MOMENTS),  # before the evaluation of the last phase's last step
    ],
)
def test_a_run_that_is_resumed_at_a_border_is_in_the_right_phase(
    state: dict[str, Any], length: int, moments: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(*_: Any) -> None: ...

    second = {"rollout": {"max_response_tokens": 9}, "reward": {"model": {"max_tokens": 64}}}
    config = tiny_config(
        rollout={"max_response_tokens": 8},
        reward={"model": {"url": "http://x", "tokenizer": "t"}},
        training={"steps": 4, "phases": [{"until_step": 2}, second]},
        checkpoint={"interval": 1},
    )
    known = SimpleNamespace(phase="rl", step=2, **{"rollouts": None, "unevaluated": None, **state})
    start = Start(Path("c"), known, begins_phase=not state)  # ty: ignore[invalid-argument-type]
    following, found = Start(), []
    checkpoints = SimpleNamespace(
        watch=SimpleNamespace(forget_rewards=nothing),
        reward_moments=dict(MOMENTS),
        back=None,
        close=nothing,
        next_start=lambda: following,
    )
    run = SimpleNamespace(
        logger=MagicMock(),
        collector=SimpleNamespace(close=nothing, source=SimpleNamespace(hand_over=nothing)),
        checkpoints=checkpoints,
        policy=None,
    )
    monkeypatch.setattr(run_module, "assemble", lambda phase, *_: (found.append(phase), run)[1])
    session: Any = SimpleNamespace(start=start, stop=None, train=lambda *_: True)
    done, after, _ = run_module._train_phase(config, (None, None, None), session, None)  # ty: ignore[invalid-argument-type]
    assert done and after is (following if "unevaluated" in state else None)
    assert [each.rollout.max_response_tokens for each in found] == [length]
    assert checkpoints.reward_moments == moments


@pytest.mark.parametrize("unevaluated", [None, {}])
def test_the_metrics_of_a_step_that_is_evaluated_again_are_written_again(
    unevaluated: dict[str, float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = MagicMock(side_effect=UserError("far enough"))
    monkeypatch.setattr(start_module, "RunLogger", logger)
    for name in ("start_processes", "resolve_parallel", "set_up_model_parallel", "build_policy"):
        monkeypatch.setattr(start_module, name, MagicMock())
    state: Any = SimpleNamespace(phase="rl", step=2, unevaluated=unevaluated)
    with pytest.raises(UserError, match="far enough"):
        start_module.start_model(tiny_config(), 48, Start(Path("c"), state))
    assert logger.call_args.kwargs["is_unlogged"] == (unevaluated is not None)
