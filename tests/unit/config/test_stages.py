"""Configurations of pre-training and fine-tuning: refused values, and numbers of steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_megatron.config import parse_config
from gspo_megatron.config.rules import check_config, sample_multiple
from gspo_megatron.config.stages import (
    FineTuningConfig,
    PreferenceConfig,
    PretrainingConfig,
    StageConfig,
)
from gspo_megatron.errors import ConfigError
from tests.unit.hf.published import write_model

SFT = {"data": {"tokenizer": "t.model", "examples": "e.jsonl"}}
PRETRAIN = {
    "data": {"tokenizer": "t.model", "train": ["a", "b"], "sequence_length": 64},
    "training": {"steps": 100},
}


def sft(*overrides: str) -> FineTuningConfig:
    return parse_config(SFT, overrides, "x", FineTuningConfig)


def pretrain(*overrides: str) -> PretrainingConfig:
    return parse_config(PRETRAIN, overrides, "x", PretrainingConfig)


def ratings(*overrides: str) -> PreferenceConfig:
    values = {"data": {"tokenizer": "t", "preferences": "p"}, "preference": {"loss": "regression"}}
    return parse_config(values, overrides, "x", PreferenceConfig)


def refusal(config: StageConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        check_config(config, config.world_size_hint())
    return str(caught.value)


@pytest.mark.parametrize("config", [sft(), pretrain()])
def test_the_defaults_are_sound(config: StageConfig) -> None:
    check_config(config, 1)
    assert config.logging.dir == "runs/x"


WHAT_IS_WRONG = [
    (sft("data.examples="), "data.examples = null: needed to train"),
    (sft("training.evaluation_interval=2"), "training.evaluation_interval = 2: there is"),
    (sft("data.max_tokens=999999"), "data.max_tokens = 999999: more than"),
    (sft("data.messages_field=messages", "data.chat_template=true"), "data.chat_template = true"),
    (sft("data.messages_field=messages", "data.prompt_field=q"),
     "data.prompt_field = 'q': data.messages_field holds whole conversations; allowed: prompt"),
    (sft("data.messages_field=messages", "data.answer_field=a"),
     "data.answer_field = 'a': data.messages_field holds whole conversations; allowed: answer"),
    (sft("optimizer.decay=wsd"), "optimizer.wsd_steps = null: optimizer.decay = wsd needs"),
    (sft("optimizer.wsd_steps=3"), "optimizer.wsd_steps = 3: nothing reads it"),
    (sft("optimizer.wsd_decay=cosine"),
     "optimizer.wsd_decay = 'cosine': nothing reads it without optimizer.decay = wsd; allowed: "
     "linear"),
    (sft("optimizer.decay=constant", "optimizer.min_learning_rate=1e-5"),
     "optimizer.min_learning_rate = 1e-05: nothing reads it with optimizer.decay = constant"),
    (sft("optimizer.warmup_steps=9", "training.steps=5"),
     "optimizer.warmup_steps = 9: longer than training.steps = 5"),
    (sft("checkpoint.keep_best=1"), "checkpoint.keep_best = 1: no checkpoint before"),
    (sft("export.hf_path=runs/x"), "export.hf_path = 'runs/x': logging.dir = runs/x lies in it"),
    (sft("checkpoint.keep_best=1", "checkpoint.interval=4", "data.eval_examples=e.jsonl",
         "training.evaluation_interval=3", "training.steps=12"),
     "checkpoint.keep_best = 1: no step before the last is both saved"),
    (sft("checkpoint.keep_best=1", "checkpoint.interval=3", "data.eval_examples=e.jsonl",
         "training.evaluation_interval=3", "checkpoint.best_metric=evaluation/loss"),
     "checkpoint.best_metric = 'evaluation/loss': lower is better, and the checkpoints with the "
     "highest are kept; allowed: evaluation/logprob"),
    (sft("model.megatron.hidden_dropout=0.1"), "model.megatron.hidden_dropout = 0.1"),
    (sft("parallel.layout=pp=3"), "parallel.pipeline_model_parallel_size = 3"),
    (sft("training.precision=fp64"), "training.precision = 'fp64'"),
    (pretrain("data.train=[]"), "data.train = []: needed to train"),
    (pretrain("training.steps="), "training.steps = null: needed to train"),
    (pretrain("data.train=[a, a]"), "a prefix is listed twice"),
    (pretrain("data.weights=[1.0]"), "data.weights = [1.0]: 1 weights for 2 prefixes"),
    (pretrain("data.sequence_length=66", "parallel.layout=cp=2"), "multiples of 4"),
    (pretrain("training.batch_size=3", "parallel.layout=dp=2"), "multiples of 2"),
    (pretrain("training.batch_size=6", "parallel.layout=pp=2,vpp=2,dp=2"),
     "in rounds of pp = 2; allowed: multiples of 4"),
    (pretrain("data.evaluation=[c]", "data.evaluation_share=0.1"), "data.evaluation_share = 0.1"),
    (pretrain("optimizer.decay=wsd", "optimizer.wsd_steps=9", "training.steps=8"),
     "optimizer.wsd_steps = 9: warmup_steps = 0 and this are together more than"),
    (pretrain("optimizer.decay=wsd", "optimizer.wsd_steps=1", "optimizer.warmup_steps=8",
              "training.steps=8"), "allowed: from 1, with fewer warmup_steps"),
    (ratings("data.margin_field=m"),
     "data.margin_field = 'm': nothing reads it with preference.loss = regression; allowed: null"),
    (ratings("data.margin_field=m", "data.format=helpsteer"),
     "data.margin_field = 'm': nothing reads it with preference.loss = regression; allowed: null"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "told"), WHAT_IS_WRONG)
def test_what_keys_get_wrong_together(config: StageConfig, told: str) -> None:
    text = refusal(config)
    assert told in text and len(text.splitlines()) == 1


def test_a_model_without_a_family_cannot_be_exported() -> None:
    odd = "model.megatron.moe_router_pre_softmax=true", "model.megatron.add_bias_linear=true"
    check_config(sft(*odd), 1)
    refused = refusal(sft(*odd, "export.hf_path=hf"))
    assert "export.hf_path = 'hf': no Hugging Face family" in refused


def test_a_model_that_its_own_family_cannot_describe_is_not_exported(tmp_path: Path) -> None:
    own = f"model.hf_path={write_model(tmp_path / 'model', 'mixtral', seed=1)}"
    odd = own, "model.megatron.moe_router_pre_softmax=true"
    check_config(sft(own, "export.hf_path=hf"), 1)
    check_config(sft(*odd), 1)
    assert refusal(sft(*odd, "export.hf_path=hf")) == (
        "export.hf_path = 'hf': a config.json of the family mixtral cannot describe this model; "
        "allowed: null"
    )


@pytest.mark.parametrize(
    ("layout", "unit"),
    [("tp=1", 1), ("tp=2", 2), ("cp=2", 4), ("tp=2,cp=2", 4), ("tp=4,cp=2", 8), ("cp=3", 6)],
)
def test_what_cuts_a_sample(layout: str, unit: int) -> None:
    assert sample_multiple(pretrain(f"parallel.layout={layout}")) == unit


@pytest.mark.parametrize(
    ("steps", "epochs", "examples"),
    [(None, None, 100), (None, 3, 300), (7, None, 56), (7, 3, 56), (99, 1, 100), (20, 2, 160)],
)
def test_steps_and_epochs(steps: int | None, epochs: int | None, examples: int) -> None:
    config = sft(
        "training.batch_size=8", f"training.steps={steps or ''}", f"training.epochs={epochs or ''}"
    )
    assert config.num_examples(100) == examples
    known = config.with_steps(100)
    assert known.training.steps == -(-examples // 8)
    # written and read again, the result is the same
    assert known.with_steps(100) == known and known.num_examples(100) == examples


def test_each_epoch_has_a_step() -> None:
    """A batch that is larger than the file would take the examples of several epochs at once."""
    config = sft("training.batch_size=64", "training.epochs=3")
    assert config.with_steps(20).training.steps == 3 and config.examples_of_step(20) == 20
    assert sft("training.steps=2").examples_of_step(20) == 64  # without epochs, as asked


@pytest.mark.parametrize(
    ("steps", "tokens", "resolved"),
    [(9, None, 9), (None, 64 * 8 * 3, 3), (2, 64 * 8 * 3, 2), (None, 64 * 8 * 3 + 1, 4)],
)
def test_tokens_make_steps(steps: int | None, tokens: int | None, resolved: int) -> None:
    words = (f"training.steps={steps or ''}", f"training.tokens={tokens or ''}")
    config = pretrain("training.batch_size=8", *words).with_steps()
    assert config.training.steps == resolved and config.with_steps() == config
