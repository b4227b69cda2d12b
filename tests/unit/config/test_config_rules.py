"""Rules about several keys: the values that each rule refuses and accepts, and its message."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from gspo_megatron.config import check_config, resolve_parallel
from gspo_megatron.config.model_rules import shares_prompts
from gspo_megatron.errors import ConfigError
from gspo_megatron.evaluation.scores import ProblemResponses, suite_figures
from tests.programs import ROOT
from tests.unit.config.configs import config_with, problems_of
from tests.unit.hf.published import write_model
from tests.unit.supervised.synthetic_preferences import preference_config

BIASED_SOFTMAX = ["model.megatron.moe_router_enable_expert_bias=true"]
BIASED_SOFTMAX += ["model.megatron.moe_router_pre_softmax=true"]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 1000])
def test_defaults_pass_on_any_world_size(world_size: int) -> None:
    assert problems_of(world_size, for_training=True) == []


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (8, ["parallel.layout=tp=2,pp=2,ep=2"]),
        (4, ["parallel.layout=tp=2,pp=2,ep=2"]),
        (2, ["parallel.layout=pp=2,vpp=2"]),
        (4, ["parallel.layout=tp=4"]),  # two query groups on four ranks: each is on two ranks
        (4, ["parallel.layout=ep=2,etp=2"]),
        (8, ["parallel.layout=cp=2,dp=4"]),
        (1024, ["model.preset=qwen3-235b-a22b", "parallel.layout=tp=4,pp=2,ep=16,cp=2"]),
        (2, ["parallel.layout=tp=2", "model.megatron.num_moe_experts=null",
             "parallel.sequence_parallel=false"]),
        # the model has no dense layer, so this width is never used
        (2, ["parallel.layout=tp=2", "model.megatron.ffn_hidden_size=255"]),
        (3, ["parallel.layout=pp=3", "model.megatron.num_layers_in_first_pipeline_stage=2"]),
        (1, ["objective.mini_batches=128"]),
        (1, ["data.max_prompt_tokens=96"]),
        (1, ["model.megatron.moe_router_topk=1", "model.megatron.moe_router_pre_softmax=true"]),
        (1, BIASED_SOFTMAX),
        (1, ["training.evaluation_interval=5", "data.eval_prompts=e.jsonl"]),
        (1, ["reward.overlong_buffer=31", "reward.overlong_penalty=0.5"]),
        (1, ["reward.scale=2", "reward.clip=3"]),
        # a custom objective may need a reference
        (1, ["objective.import_path=mine:loss", "routing.reference_replay=r3"]),
        (1, ["objective.distillation.url=http://a/v1"]),
        (1, ["rollout.temperature=0.7", "objective.distillation.teacher=t"]),
        (1, ["reward.repetition_penalty=0.5", "reward.repetition_words=4"]),
        (1, ["environment.verifiers=textarena", "environment.python=sh"]),
        (1, ["environment.import_path=games:Game", "environment.max_turns=4"]),
        (1, ["optimizer.decay=linear", "optimizer.min_learning_rate=1e-7"]),
        # a run that only evaluates, perhaps the run of an earlier version, has no learning rates
        (1, ["training.steps=0", "optimizer.min_learning_rate=1e-7"]),
        (1, ["rollout.dynamic_sampling=true", "rollout.max_refills=0"]),
        (1, ["evaluation.suites={a: {prompts: p, failed: wrong, reward: {on_failure: "
             "drop_group}}}"]),
        (1, ["evaluation.suites={a: {prompts: [p, q], format: math, template: '{problem}'}}"]),
        (1, ["evaluation.suites={a: {prompts: p, prompt_field: q, answer_field: null}}"]),
        (1, ["rollout.temperature=2.5", "evaluation.suites={a: {prompts: p, temperature: 3.0}}"]),
        (1, ["rollout.engine=vllm", "rollout.vllm.servers=1", "rollout.temperature=2",
             "evaluation.suites={a: {prompts: p, temperature: 0}}"]),
        (1, ["training.steps=0", "data.prompts=", "data.eval_prompts=e.jsonl",
             "checkpoint.keep_best=1", "training.evaluation_interval=5"]),
    ],
)  # fmt: skip
def test_sound_configurations_pass(world_size: int, overrides: list[str]) -> None:
    assert problems_of(world_size, *overrides) == []


DELTA_NETS = [
    "model.megatron.experimental_attention_variant=gated_delta_net",
    "model.megatron.linear_attention_freq=2",
]


@pytest.mark.parametrize(
    ("world_size", "overrides", "start", "wrong"),
    [
        (6, ["parallel.layout=tp=2,pp=2"], "world size = 6",
         "not divisible by tp * pp * cp = 2 * 2 * 1 = 4; allowed: multiples of 4"),
        (3, ["parallel.layout=ep=2"], "world size = 3",
         "not divisible by etp * ep * pp = 1 * 2 * 1 = 2"),
        (8, ["parallel.layout=tp=2,dp=2"], "parallel.data_parallel_size = 2",
         "that takes 4 ranks, not 8; allowed: null"),
        (8, ["parallel.layout=tp=8"], "parallel.tensor_model_parallel_size = 8",
         "does not divide num_attention_heads = 4; allowed: 1, 2, 4"),
        (3, ["parallel.layout=tp=3", "model.megatron.num_attention_heads=6",
             "model.megatron.hidden_size=96"],
         "parallel.tensor_model_parallel_size = 3",
         "neither divides num_query_groups = 2 nor is a multiple of it"),
        (1, ["model.megatron.num_query_groups=3"], "model.megatron.num_query_groups = 3",
         "does not divide num_attention_heads = 4; allowed: 1, 2, 4"),
        (4, ["parallel.layout=tp=4", "model.megatron.hidden_size=66"],
         "parallel.tensor_model_parallel_size = 4", "does not divide hidden_size = 66"),
        (2, ["parallel.layout=tp=2", "model.megatron.num_moe_experts=null",
             "model.megatron.ffn_hidden_size=255"],
         "parallel.tensor_model_parallel_size = 2", "does not divide ffn_hidden_size = 255"),
        (2, ["parallel.layout=cp=2", *DELTA_NETS], "parallel.context_parallel_size = 2",
         "passes along the sequence: no rank can begin within it; allowed: 1"),
        (2, ["parallel.layout=tp=2", *DELTA_NETS, "model.megatron.linear_num_key_heads=1"],
         "parallel.tensor_model_parallel_size = 2", "does not divide linear_num_key_heads = 1"),
        (2, ["parallel.layout=tp=2", "parallel.sequence_parallel=false", *DELTA_NETS,
             "model.megatron.num_moe_experts=null"],
         "parallel.sequence_parallel = false", "delta nets with tp > 1 need it"),
        (1, ["training.share_prompts=true", "training.packing=false"],
         "training.share_prompts = true",
         "each response has a row of its own; allowed: null or false"),
        (2, ["training.share_prompts=true", "parallel.layout=cp=2"],
         "training.share_prompts = true", "with cp = 2 a rank holds only parts of a prompt"),
        (1, ["training.share_prompts=true", *DELTA_NETS],
         "training.share_prompts = true", "passes along the whole sequence"),
        (1, ["training.share_prompts=true", "model.megatron.moe_token_dispatcher_type=allgather"],
         "training.share_prompts = true", "needs micro-batches of one length"),
        (1, ["model.megatron.multi_latent_attention=true", "model.megatron.apply_rope_fusion=true"],
         "model.megatron.apply_rope_fusion = true", "does not support the fused kernel"),
        (2, ["parallel.layout=tp=2", "parallel.sequence_parallel=false",
             "model.megatron={multi_latent_attention: true, num_moe_experts: null}"],
         "parallel.sequence_parallel = false", "latent attention with tp = 2 needs it"),
        *((1, ["model.megatron.multi_latent_attention=true", f"model.megatron.{no_latent}"],
           "model.megatron.multi_latent_attention = true", "allowed: without window_size")
          for no_latent in ("window_size=[7, 0]", "softmax_type=learnable")),
        (1, ["model.megatron.softmax_type=off-by-one"],
         "model.megatron.softmax_type = 'off-by-one'", "allowed: vanilla or learnable"),
        (1, ["model.megatron.linear_attention_freq=2"],
         "model.megatron.experimental_attention_variant = null", "allowed: gated_delta_net"),
        (2, ["parallel.layout=tp=2", "model.megatron.moe_shared_expert_intermediate_size=33"],
         "parallel.tensor_model_parallel_size = 2",
         "does not divide moe_shared_expert_intermediate_size = 33"),
        (1, ["parallel.sequence_parallel=true"], "parallel.sequence_parallel = true",
         "allowed: null, or tp > 1"),
        (2, ["parallel.layout=tp=2", "parallel.sequence_parallel=false"],
         "parallel.sequence_parallel = false", "experts with tp = 2 need it"),
        (1, ["parallel.layout=vpp=2"], "parallel.virtual_pipeline_model_parallel_size = 2",
         "interleaving needs stages"),
        (3, ["parallel.layout=pp=3"], "parallel.pipeline_model_parallel_size = 3",
         "4 layers do not split evenly into 3 chunks"),
        (2, ["parallel.layout=pp=2,vpp=4"], "parallel.pipeline_model_parallel_size = 2",
         "4 layers do not split evenly into 2 * 4 chunks"),
        (3, ["parallel.layout=ep=3"], "parallel.expert_model_parallel_size = 3",
         "does not divide num_moe_experts = 8; allowed: 1, 2, 4, 8"),
        (3, ["parallel.layout=etp=3"], "parallel.expert_tensor_parallel_size = 3",
         "does not divide moe_ffn_hidden_size = 64"),
        (2, ["parallel.layout=ep=2", "model.megatron.num_moe_experts=null"],
         "parallel.expert_model_parallel_size = 2", "the model has no experts; allowed: 1"),
        (2, ["parallel.layout=etp=2", "model.megatron.num_moe_experts=null"],
         "parallel.expert_tensor_parallel_size = 2", "the model has no experts; allowed: 1"),
        (1, ["model.megatron={num_moe_experts: null, moe_ffn_hidden_size: 64}"],
         "model.megatron.moe_ffn_hidden_size = 64", "the model has no experts"),
        (1, ["model.megatron.moe_router_topk=9"], "model.megatron.moe_router_topk = 9",
         "there are 8 experts; allowed: 1 to 8"),
        (1, ["model.megatron.moe_router_topk=1"], "model.megatron.moe_router_topk = 1",
         "has no gradient"),
        (1, [*BIASED_SOFTMAX, "model.megatron.moe_router_topk=1"],
         "model.megatron.moe_router_topk = 1", "has no gradient; allowed: 2 or more"),
        (1, [*BIASED_SOFTMAX[:1]], "model.megatron.moe_router_pre_softmax = false",
         "the softmax router with a bias supports nothing else; allowed: true"),
        (1, [*BIASED_SOFTMAX, "model.megatron.moe_router_fusion=true"],
         "model.megatron.moe_router_fusion = true", "allowed: leave it out"),
        (1, ["model.megatron.hidden_dropout=0.1"], "model.megatron.hidden_dropout = 0.1",
         "old and new policy differ; allowed: leave it out"),
        (1, ["model.megatron.moe_input_jitter_eps=0.01"],
         "model.megatron.moe_input_jitter_eps = 0.01", "old and new policy differ"),
        (1, ["model.megatron.moe_router_topk_limited_devices=1"],
         "model.megatron.moe_router_topk_limited_devices = 1", "use moe_router_num_groups"),
        (1, ["model.megatron.moe_router_force_load_balancing=true"],
         "model.megatron.moe_router_force_load_balancing = true", "random"),
        (1, ["model.megatron.moe_router_load_balancing_type=global_aux_loss"],
         "model.megatron.moe_router_load_balancing_type = 'global_aux_loss'",
         "number of data-parallel ranks"),
        (1, ["model.megatron.moe_router_load_balancing_type=sinkhorn",
             "model.megatron.moe_aux_loss_coeff=0.0"],
         "model.megatron.moe_router_load_balancing_type = 'sinkhorn'", "one rank"),
        (2, ["parallel.layout=etp=2", "model.megatron.add_bias_linear=true"],
         "parallel.expert_tensor_parallel_size = 2",
         "the biases of experts cannot be split over ranks; allowed: 1"),
        (1, ["model.megatron.window_size=[7]"], "model.megatron.window_size = [7]",
         "allowed: [keys before a query's own, 0]"),
        (1, ["model.megatron={window_size: [7, 0], window_attn_skip_freq: [1, 0]}"],
         "model.megatron.window_attn_skip_freq = [1, 0]", "allowed: null, n, or 4 flags"),
        (1, ["model.megatron.moe_layer_freq=[1]"], "model.megatron.moe_layer_freq = [1]",
         "allowed: null, n, or 4 flags"),
        (1, ["rollout.max_response_tokens=128"], "rollout.max_response_tokens = 128",
         "leaves no room for a prompt in max_sequence_length = 128; allowed: at most 127"),
        (1, ["data.max_prompt_tokens=97"], "data.max_prompt_tokens = 97", "allowed: at most 96"),
        *((1, [f"logging.dir={place}"], f"logging.dir = '{place}'", "a folder of the system")
          for place in ("/", "//", "/tmp/..", "/proc/self")),
        (1, ["rollout.group_size=1"], "rollout.group_size = 1", "allowed: from 2"),
        (1, ["rollout.max_staleness=1"], "rollout.max_staleness = 1",
         "draws the responses itself; allowed: 0, or engine = vllm"),
        (1, ["environment.verifiers=textarena"], "environment.python = null",
         "needs the interpreter that has the package verifiers"),
        (1, ["environment.verifiers=textarena", "environment.python=no/python"],
         "environment.python = 'no/python'", "no such program; allowed: the interpreter"),
        (1, ["environment.python=python"], "environment.python = 'python'",
         "nothing reads it without environment.verifiers; allowed: null"),
        (1, ["environment.max_turns=4"], "environment.max_turns = 4",
         "nothing reads it with environment.name = single_turn; allowed: 8"),
        (1, ["environment.verifiers=a", "environment.python=sh", "environment.name=agent"],
         "environment.verifiers = 'a'", "environment.name is set, too"),
        (1, ["environment.verifiers=a", "environment.python=sh", "environment.import_path=m:C"],
         "environment.verifiers = 'a'", "environment.import_path is set, too"),
        (1, ["objective.max_token_staleness=0"], "objective.max_token_staleness = 0",
         "allowed: null"),
        (1, ["rollout.kv_after_update=keep", "rollout.max_staleness=0"],
         "rollout.kv_after_update = 'keep'",
         "no response runs during an update; allowed: recompute"),
        (1, ["objective.mini_batches=129"], "objective.mini_batches = 129", "allowed: 1 to 128"),
        *(
            (1, ["rollout.engine=vllm", "rollout.vllm.servers=1", f"rollout.temperature={value}"],
             f"rollout.temperature = {value}", "allowed with engine = vllm: 0.01 to 2.0")
            for value in (2.5, 0.005)
        ),
        (1, ["rollout.engine=vllm", "rollout.vllm.servers=1",
             "evaluation.suites={a: {prompts: p, temperature: 3.0}}"],
         "evaluation.suites.a.temperature = 3.0", "vllm: 0.01 to 2.0, or 0.0"),
        (1, ["rollout.engine=vllm", "rollout.vllm.servers=1",
             "rollout.vllm.options={middleware: m.Own}"],
         "rollout.vllm.options.middleware = 'm.Own'", "the run sets it itself; allowed: leave it"),
        (1, ["optimizer.decay=cosine", "optimizer.min_learning_rate=1e-3"],
         "optimizer.min_learning_rate = 0.001", "allowed: at most learning_rate = 1e-06"),
        (1, ["optimizer.min_learning_rate=1e-7"], "optimizer.min_learning_rate = 1e-07",
         "nothing reads it with optimizer.decay = constant; allowed: 0.0"),
        (1, ["training.evaluation_interval=5"], "training.evaluation_interval = 5",
         "give data.eval_prompts"),
        (1, ["routing.replay=r2", "model.megatron.num_moe_experts=null"],
         "routing.replay = 'r2'", "the model has no experts"),
        (1, ["routing.volatility=true", "model.megatron.moe_router_fusion=true"],
         "routing.volatility = true", "allowed with it: model.megatron.moe_router_fusion = false"),
        (1, ["routing.volatility=true",
             "model.megatron.moe_router_load_balancing_type=quantile_balancing",
             "model.megatron.moe_aux_loss_coeff=0.0"],
         "routing.volatility = true", "quantile balancing does not call the hook"),
        (1, ["routing.replay=r2", "model.megatron.cuda_graph_impl=local"],
         "routing.replay = 'r2'", "allowed with it: no model.megatron.cuda_graph_impl"),
        (1, ["routing.rollout_noise=0.1", "model.megatron.enable_cuda_graph=true"],
         "routing.rollout_noise = 0.1", "allowed with it: no model.megatron.enable_cuda_graph"),
        (1, ["routing.replay=r3", "model.megatron.moe_expert_capacity_factor=1.25"],
         "routing.replay = 'r3'",
         "allowed with it: model.megatron.moe_expert_capacity_factor = null"),
        (1, ["routing.reference_replay=r2", "objective.kl=k3", "objective.kl_coefficient=0.1",
             "model.megatron.moe_expert_capacity_factor=1.25"],
         "routing.reference_replay = 'r2'", "full experts drop tokens after the choice"),
        (1, ["routing.store_on_host=true"], "routing.store_on_host = true",
         "nothing reads it with replay = off and reference_replay = off; allowed: false"),
        (1, ["routing.replay=r3", "routing.reference_replay=r3"],
         "routing.reference_replay = 'r3'",
         "there is no reference with objective.kl = none; allowed: off, or another kl "
         "(kl_coefficient = 0.0 only measures it)"),
        (1, ["checkpoint.keep_best=2"], "checkpoint.keep_best = 2",
         "no checkpoint before the last has evaluation/accuracy; allowed: 0, or set training.eval"),
        (1, ["checkpoint.keep_best=2", "checkpoint.interval=4", "data.eval_prompts=e.jsonl",
             "training.evaluation_interval=6", "training.steps=12"], "checkpoint.keep_best = 2",
         "no step before the last is both saved (checkpoint.interval = 4) and evaluated "
         "(training.evaluation_interval = 6)"),
        (1, ["checkpoint.interval=1", "optimizer.megatron.optimizer=sgd"],
         "optimizer.megatron.optimizer = 'sgd'", "cannot be saved; allowed: adam"),
        (1, ["checkpoint.interval=1", "parallel.ddp.use_distributed_optimizer=false"],
         "parallel.ddp.use_distributed_optimizer = false", "cannot be saved; allowed: true"),
        (1, ["training.on_collapse=stop"], "checkpoint.interval = 0",
         "allowed: from 1, or training.on_collapse = warn in place of stop"),
        (1, ["training.on_collapse=rollback"], "checkpoint.interval = 0",
         "allowed: from 1, or training.on_collapse = warn in place of rollback"),
        (1, ["training.on_collapse=rollback", "checkpoint.interval=9", "training.steps=16777216"],
         "training.steps = 16777216", "allowed: below 16777216, or on_collapse = stop"),
        (1, ["objective.advantage=gdpo", "reward.scale=2.0"], "reward.scale = 2.0",
         "normalises each part of the reward by itself; allowed: 1.0"),
        (1, ["objective.advantage=gdpo", "reward.clip=1.0"], "reward.clip = 1.0",
         "normalises each part of the reward by itself; allowed: null"),
        (1, ["rollout.temperature=0.7", "objective.distillation.url=http://a/v1"],
         "rollout.temperature = 0.7",
         "gives log-probs at temperature 1; allowed: 1.0, or a teacher in a folder"),
        (1, ["objective.distillation.url=127.0.0.1:8000/v1"],
         "objective.distillation.url = '127.0.0.1:8000/v1'", "allowed: http://host:port/v1"),
        (1, ["objective.distillation={field: f, teachers: {a: {url: 'http://a/v1'}, b: {url: b}}}"],
         "objective.distillation.teachers.b.url = 'b'", "allowed: http://host:port/v1"),
        (1, ["reward.overlong_buffer=32"], "reward.overlong_buffer = 32",
         "leaves no response of max_response_tokens = 32 without a penalty; allowed: null, or "
         "below"),
        (1, ["reward.overlong_penalty=0.5"], "reward.overlong_penalty = 0.5",
         "nothing reads it without reward.overlong_buffer; allowed: 1.0"),
        (1, ["reward.repetition_words=4"], "reward.repetition_words = 4",
         "nothing reads it without reward.repetition_penalty; allowed: 3"),
        (1, ["evaluation.suites={a: {prompts: p, samples: 2, temperature: 0.0}}"],
         "evaluation.suites.a.temperature = 0.0",
         "greedy responses are all the same, and samples = 2"),
        (1, ["evaluation.suites={a: {prompts: p, reward: {scale: 2.0}}}"],
         "evaluation.suites.a.reward.scale = 2.0", "rewards of an evaluation are not shaped"),
        (1, ["evaluation.suites={a: {prompts: p, filter: {last: '2024'}}}"],
         "evaluation.suites.a.filter.field = null", "nothing tells which field has the date"),
        (1, ["evaluation.suites={a: {prompts: p, max_response_tokens: 128}}"],
         "evaluation.suites.a.max_response_tokens = 128",
         "128 leave no room for a prompt in max_sequence_length = 128"),
        (1, ["evaluation.suites={a: {prompts: p, failed: wrong}}"],
         "evaluation.suites.a.failed = 'wrong'", "reward.on_failure = stop ends the evaluation"),
        (1, ["evaluation.suites={a: {prompts: p, format: math, prompt_field: q}}"],
         "evaluation.suites.a.prompt_field = 'q'",
         "evaluation.suites.a.format = math names it; allowed: prompt"),
        (1, ["evaluation.suites={a: {prompts: p, format: math, answer_field: null}}"],
         "evaluation.suites.a.answer_field = null",
         "evaluation.suites.a.format = math names it; allowed: answer"),
        (1, ["evaluation.suites={a: {prompts: p, template: '{q}?', prompt_field: q}}"],
         "evaluation.suites.a.prompt_field = 'q'",
         "evaluation.suites.a.template makes the prompt; allowed: prompt"),
        (1, ["evaluation.suites={a: {prompts: []}}"], "evaluation.suites.a.prompts = []",
         "there is nothing to evaluate on; allowed: a file, or several"),
        (1, ["evaluation.suites={a: {prompts: [p, ./p]}}"],
         "evaluation.suites.a.prompts = ['p', './p']", "a file is listed twice; allowed: once"),
        (1, ["rollout.max_refills=7"], "rollout.max_refills = 7",
         "nothing reads it without rollout.dynamic_sampling; allowed: 4"),
    ],
)  # fmt: skip
def test_each_rule_refuses_with_key_value_and_what_is_legal(
    world_size: int, overrides: list[str], start: str, wrong: str
) -> None:
    (line,) = problems_of(world_size, *overrides)
    assert line.startswith(f"{start}: ")
    assert wrong in line


def test_keys_that_are_normalised_together_are_on_one_rank_each(tmp_path: Path) -> None:
    heads = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = f"model.hf_path={write_model(tmp_path / 'm', 'minimax_m2', seed=1, **heads)}"
    [line] = problems_of(4, model, "parallel.layout=tp=4")
    assert line.startswith("parallel.tensor_model_parallel_size = 4: keys are normalised over all ")
    assert problems_of(2, model, "parallel.layout=tp=2") == []


def test_collapses_can_be_answered_where_checkpoints_are() -> None:
    for does in ("stop", "rollback"):
        assert problems_of(1, f"training.on_collapse={does}", "checkpoint.interval=1") == []
        # with no steps, the run has nothing to save
        assert not any(
            "checkpoint" in line
            for line in problems_of(1, f"training.on_collapse={does}", "training.steps=0")
        )
    assert problems_of(1, "training.on_collapse=warn") == []


def test_what_replay_asks_for_is_asked_for_replay_alone() -> None:
    capacity = "model.megatron.moe_expert_capacity_factor=1.25"
    assert problems_of(1, capacity) == []
    assert problems_of(1, capacity, "routing.volatility=true") == []
    kl = ("objective.kl=k3", "objective.kl_coefficient=0.1")
    for policy, reference in itertools.product(("off", "r2", "r3"), repeat=2):
        modes = (*kl, f"routing.replay={policy}", f"routing.reference_replay={reference}")
        assert problems_of(1, *modes) == []
        host = problems_of(1, *modes, "routing.store_on_host=true")
        assert bool(host) == (policy == reference == "off")


def test_the_best_checkpoints_may_be_known_by_some_evaluations() -> None:
    together = ["checkpoint.keep_best=2", "checkpoint.interval=4", "data.eval_prompts=e.jsonl"]
    together += ["training.evaluation_interval=6", "training.steps=12"]
    for override in (
        "training.steps=13",  # step 12 is saved and evaluated
        "checkpoint.keep_best=0",
        "checkpoint.best_metric=reward/mean",
        "checkpoint.interval=0",  # no checkpoints are kept at all
    ):
        assert problems_of(1, *together, override) == []


def test_all_problems_of_a_hopeless_configuration_come_at_once() -> None:
    lines = problems_of(
        16,
        "parallel.layout=tp=3,pp=3,ep=3,etp=5,cp=2,dp=7",
        "checkpoint.keep_best=2",
        "objective.mini_batches=1000",
        "objective.clip_low=0.2",
        "rollout.group_size=1",
        "data.prompts=",
        for_training=True,
    )
    axes = ("data", "tensor_model", "pipeline_model", "expert_model", "expert_tensor")
    others = "checkpoint.keep_best objective.mini_batches objective.clip_low rollout.group_size"
    assert {line.split(" =")[0] for line in lines} == {
        "world size",
        "data.prompts",
        *(f"parallel.{axis}_parallel_size" for axis in axes),
        *others.split(),
    }


def test_prompts_are_only_needed_to_train() -> None:
    assert problems_of(1, "data.prompts=") == []
    (line,) = problems_of(1, "data.prompts=", for_training=True)
    assert line == "data.prompts = null: needed to train; allowed: a .jsonl or .parquet file"


def test_a_run_of_no_steps_needs_held_out_prompts_only() -> None:
    words = ("training.steps=0", "data.prompts=")
    (line,) = problems_of(1, *words, for_training=True)
    assert line == (
        "training.steps = 0: evaluates only, and there is nothing to evaluate on; allowed: from 1, "
        "or give data.eval_prompts or evaluation.suites"
    )
    assert problems_of(1, *words, "data.eval_prompts=e.jsonl", for_training=True) == []


def test_every_layout_that_passes_resolves_and_multiplies_out() -> None:
    """The rules accept a small layout exactly if its groups cover all ranks."""
    accepted = 0
    sizes = itertools.product((1, 2, 4), (1, 2, 3), (1, 2, 8), (1, 2), (1, 2), (1, 2, 4, 8, 12))
    for tp, pp, ep, etp, cp, world in sizes:
        text = f"tp={tp},pp={pp},ep={ep},etp={etp},cp={cp}"
        legal = pp != 3 and world % (tp * pp * cp) == 0 and world % (etp * ep * pp) == 0
        override = f"parallel.layout={text}"
        assert (problems_of(world, override) == []) == legal, text
        if not legal:
            continue
        accepted += 1
        resolved = resolve_parallel(config_with(override), world)
        assert tp * pp * cp * resolved.data_parallel_size == world
        assert etp * ep * pp * resolved.expert_data_parallel_size == world
    assert accepted > 50


@pytest.mark.parametrize(
    ("nodes", "overrides", "told"),
    [
        ("", [], None),
        ("a,b", ["rollout.engine=vllm", "rollout.vllm.servers=4"], None),
        (
            "a,b",
            ["rollout.engine=vllm", "rollout.vllm.servers=3"],
            "rollout.vllm.servers = 3: does not spread evenly over the 2 nodes of "
            "GSPO_ROLLOUT_NODES = a,b; allowed: multiples of 2",
        ),
        (
            "a",
            ["rollout.engine=vllm", "rollout.vllm.urls=[http://x]"],
            "rollout.vllm.servers = 0",
        ),
        ("a", [], "rollout.engine = 'megatron': nothing runs on the nodes of GSPO_ROLLOUT_NODES"),
        (" a, b,", ["rollout.engine=vllm", "rollout.vllm.servers=2"], None),
        (
            "a,b, a",
            ["rollout.engine=vllm", "rollout.vllm.servers=3"],
            "rollout.vllm.servers = 3: one of the nodes of GSPO_ROLLOUT_NODES = a,b,a is named "
            "twice; allowed: each node once",
        ),
    ],
)
def test_nodes_for_rollouts_have_servers(
    monkeypatch: pytest.MonkeyPatch, nodes: str, overrides: list[str], told: str | None
) -> None:
    monkeypatch.setenv("GSPO_ROLLOUT_NODES", nodes)
    problems = problems_of(1, *overrides)
    assert len(problems) == (told is not None)
    assert told is None or problems[0].startswith(told)


@pytest.mark.parametrize(
    ("overrides", "staleness"),
    [
        ([], 0),
        (["rollout.engine=vllm"], 1),
        (["rollout.engine=vllm", "rollout.max_staleness=0"], 0),
        (["rollout.engine=vllm", "rollout.max_staleness=4"], 4),
    ],
)
def test_servers_draw_one_step_ahead_unless_told_otherwise(
    overrides: list[str], staleness: int
) -> None:
    assert config_with(*overrides).rollout.staleness == staleness


def test_each_running_server_is_named_once() -> None:
    twice = ["rollout.engine=vllm", "rollout.vllm.urls=[http://A:1,http://a:1/,http://b:1]"]
    [told] = [each for each in problems_of(1, *twice) if "urls" in each]
    assert told.endswith("http://a:1 is listed 2 times; allowed: each server once"), told


EVALUATED = [
    "checkpoint.keep_best=1", "checkpoint.interval=5", "training.evaluation_interval=5",
    "data.eval_prompts=e.jsonl", "evaluation.interval=5",
    "evaluation.suites={aime: {prompts: e.jsonl, samples: 6}}",
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("evaluation/acuracy", "did you mean evaluation/accuracy"),
        ("evaluaton/accuracy", "did you mean evaluation/accuracy"),
        ("accuracy", "did you mean evaluation/accuracy?"),
        ("pass_at_4", "did you mean evaluation/aime/pass_at_4"),
        ("evaluation/aime/pass_at_3", "did you mean evaluation/aime/pass_at_"),
        ("evaluation/math/mean", "did you mean evaluation/aime/mean"),
    ],
)
def test_a_slip_in_the_best_metric_is_told(name: str, meant: str) -> None:
    [line] = problems_of(1, *EVALUATED, f"checkpoint.best_metric={name}")
    assert line.startswith(f"checkpoint.best_metric = '{name}': no evaluation of this run has it")
    assert meant in line


def test_other_metrics_are_left_to_the_run() -> None:
    """The metrics of docs/metrics.md, of custom rewards and objectives, and of any suite are
    accepted."""
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`[^|]*) \|", page, re.MULTILINE)
    names = {name for name in re.findall(r"`([^`]+)`", " ".join(cells)) if "evaluation" not in name}
    assert len(names) > 40
    names |= {"reward/format", "mine/figure"}
    names |= {"evaluation/accuracy_low", "evaluation/accuracy_high", "evaluation/prompts"}
    for name in sorted(names):
        assert problems_of(1, *EVALUATED, f'checkpoint.best_metric="{name}"') == [], name


@pytest.mark.parametrize("name", ["evaluation/loss", "evaluation/failed"])
def test_a_metric_whose_lowest_value_is_the_best_is_refused(name: str) -> None:
    [line] = problems_of(1, *EVALUATED, f"checkpoint.best_metric={name}")
    wrong = "lower is better, and the checkpoints with the highest are kept"
    assert line == f"checkpoint.best_metric = '{name}': {wrong}; allowed: evaluation/accuracy"


def test_the_figures_of_suites_are_those_that_a_suite_has() -> None:
    answers = [ProblemResponses([1.0] * 6, [True] * 6, ["a"] * 6, [False] * 6, [3] * 6)] * 2
    of_failures = ["truncated", "failed", "left_out"]  # lower is better
    for figure in suite_figures(answers, 6):
        problems = problems_of(1, *EVALUATED, f"checkpoint.best_metric=evaluation/aime/{figure}")
        assert bool(problems) is (figure in of_failures)


BIASES = [
    "model.megatron.moe_router_score_function=sigmoid",
    "model.megatron.moe_router_enable_expert_bias=true",
]


def test_preference_models_share_prompts_by_the_same_rules() -> None:
    assert shares_prompts(preference_config("tp=2"))
    assert not shares_prompts(preference_config("cp=2"))
    config = preference_config("cp=2", training={"share_prompts": True})
    with pytest.raises(ConfigError, match=r"share_prompts = true: with cp = 2 a rank holds only"):
        check_config(config, 2, for_training=False)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], True),
        (["training.share_prompts=false"], False),
        (["training.packing=false"], False),
        (["parallel.layout=cp=2"], False),
        (DELTA_NETS, False),
        (["model.megatron.moe_token_dispatcher_type=allgather"], False),
        # Megatron-Core trains the biases, unless their rate is 0 or only adapters are trained.
        (BIASES, False),
        ([*BIASES, "model.megatron.moe_router_bias_update_rate=0.0"], True),
        ([*BIASES, "model.lora.rank=4"], True),
        ([*BIASES, "training.share_prompts=true"], True),
    ],
)
def test_prompts_are_shared_where_it_changes_no_bias(overrides: list[str], expected: bool) -> None:
    assert shares_prompts(config_with(*overrides)) is expected
