"""The layouts that the search for a fitting layout tries."""

from __future__ import annotations

from gspo_megatron.estimate.suggest import suggest
from tests.unit.estimate.conftest import ConfigMaker


def test_layers_that_no_number_of_stages_divides(make_config: ConfigMaker) -> None:
    """The model has 5 layers, or 7 with embedding and loss. Two stages get 3 and 2 of the
    layers."""
    model = {"vocab_size": 80, "megatron": {"num_layers": 5}}
    rollout = {"prompts_per_step": 4, "group_size": 2, "max_response_tokens": 16}
    config = make_config("tiny", "tp=1", model=model, rollout=rollout)
    found = suggest(config, 2, 80, (10**6, 10**6), 80e9, count=40).suggestions
    staged = [each for each in found if "pp=2" in each.overrides]
    last = "parallel.layout=pp=2 model.megatron.num_layers_in_last_pipeline_stage=2"
    assert last in {each.overrides for each in staged}
    assert all([rank.layers for rank in each.estimate.ranks] == [3, 2] for each in staged)


def test_a_layout_fits_in_every_phase_of_a_run(make_config: ConfigMaker) -> None:
    """In the second phase the responses are longer, and more of them are decoded together."""
    sections = {
        "model": {"vocab_size": 80},
        "rollout": {"prompts_per_step": 4, "group_size": 2, "max_response_tokens": 8},
        "checkpoint": {"interval": 1},
    }
    longer = {"rollout": {"prompts_per_step": 16384, "max_response_tokens": 100}}
    phases = {"steps": 10, "phases": [{"until_step": 8}, longer]}
    short = make_config("tiny", "tp=1", **sections)
    both = make_config("tiny", "tp=1", **sections, training=phases)
    arguments = (1, 80, (10**6, 10**6))
    alone = suggest(short, *arguments, 80e9, count=40)
    every = suggest(both, *arguments, 80e9, count=40)
    assert {each.overrides for each in every.suggestions} == {
        each.overrides for each in alone.suggestions
    }
    of_short = {each.overrides: each for each in alone.suggestions}
    for each in every.suggestions:
        estimate = each.estimate
        assert getattr(estimate.config, "rollout").max_response_tokens == 100  # noqa: B009
        assert estimate.worst.total > of_short[each.overrides].estimate.worst.total
        assert each.cost.total > of_short[each.overrides].cost.total
    least = min(each.estimate.worst.total for each in every.suggestions)
    assert suggest(short, *arguments, least, count=40).suggestions
    assert not suggest(both, *arguments, least, count=40).suggestions  # leaves no headroom
