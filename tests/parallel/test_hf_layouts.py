"""Import and export on sharded layouts. An export has the same bits as the imported folder, and the
model computes the same on every layout."""

from __future__ import annotations

import functools
import json
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from gspo_megatron.config import Config, resolve_parallel
from gspo_megatron.errors import DataError
from gspo_megatron.hf.export import export_hf
from gspo_megatron.models.build import Policy
from gspo_megatron.platform.groups import set_up_model_parallel
from tests.parallel.pool import Pool
from tests.unit.hf.mistakes import mistaken
from tests.unit.hf.policies import config_of, greedy, policy_of
from tests.unit.hf.published import (
    CONFIGS,
    VOCABULARY,
    assert_same_bits,
    read_folder,
    write_model,
)

LAYOUTS = [
    "tp=1",
    "tp=2",
    "pp=2",
    "dp=2,ep=2",
    "tp=2,etp=2",
    "tp=2,pp=2,ep=2",
    "tp=2,pp=2,vpp=2,ep=2",
]
# Other families have features that qwen3_moe lacks. They are tested on layouts that cut these
# features.
OTHERS = [
    ("qwen3", "tp=2,pp=2"),
    ("qwen2_moe", "tp=2,etp=2"),
    ("qwen2_moe", "tp=2,pp=2,vpp=2,ep=2"),
    ("mixtral", "tp=2,ep=2"),
    ("mixtral", "pp=2"),
    ("olmoe", "tp=2,etp=2"),
    ("deepseek_v3", "tp=2"),
    ("deepseek_v3", "tp=2,pp=2,vpp=2,ep=2"),
    ("gpt_oss", "tp=2,pp=2,ep=2"),
    ("bailing_moe_v2", "tp=2,pp=2,ep=2"),
    ("ernie4_5_moe", "tp=2,pp=2,ep=2"),
    ("minimax_m2", "tp=2,etp=2"),
]
MORE_LAYOUTS = ["cp=2", "dp=2,cp=2,ep=2", "tp=2,ep=2,etp=2,pp=2"]
QUICK = [*(("qwen3_moe", layout) for layout in LAYOUTS[1:]), *OTHERS]
REST = [
    (family, layout)
    for family in CONFIGS
    for layout in LAYOUTS[1:] + MORE_LAYOUTS
    if (family, layout) not in QUICK
    # This family has no experts.
    and not (family == "qwen3" and ("ep=" in layout or "etp=" in layout))
    and not (family == "gpt_oss" and "etp=" in layout)  # biases of experts cannot be cut
]
IN_BF16 = ("qwen3_moe", "tp=2,pp=2,ep=2")
REST_IN_BF16 = [case for case in QUICK + REST if case[1] in LAYOUTS and case != IN_BF16]
# for log-probs in fp32: the order of their sums depends on the shards
TOLERANCE = 1e-5

_draw = random.Random(8)
PROMPTS = [[_draw.randrange(VOCABULARY) for _ in range(length)] for length in (4, 1, 7)]
Said = tuple[list[list[int]], list[list[float]]]  # tokens and their log-probs


def _policy(config: Config) -> Policy:
    parallel = resolve_parallel(config, dist.get_world_size())
    set_up_model_parallel(parallel, config.training.seed)
    return policy_of(config)


def round_trip(
    config: Config,
    target: Path,
    prompts: list[list[int]] | None = None,
    mistake: str | None = None,
    exporting: bool = True,
) -> Said | None:
    """Import and export. If there are prompts, the model generates responses to them before the
    export. `mistake`: a fault in the weight map, for the import and, if `exporting`, also for the
    export."""
    wrong = mistaken(mistake, importing=True, exporting=exporting) if mistake else nullcontext()
    with wrong:
        policy = _policy(config)
        found = greedy(policy, prompts, count=10) if prompts else None
        original = json.loads((Path(config.model.hf_path) / "config.json").read_text())
        export_hf(policy, target, hf_config=original, max_shard_bytes=40_000)
    return found


def failed_export(config: Config, target: Path) -> str:
    """This rank's error of an export that cannot be written."""
    try:
        export_hf(_policy(config), target)
    except DataError as error:
        return str(error)
    return "nothing"


def _trip(pool: Pool, source: Path, dtype: str, layout: str, **options: Any) -> Said | None:
    """Make a round trip and check that nothing is lost."""
    target = source.with_name(f"{source.name}-{layout}-again")
    config = config_of(source, dtype, layout)
    said = pool.on(config, round_trip, target=target, **options)
    assert_same_bits(read_folder(target), read_folder(source))
    return said


@functools.cache
def _of_one_rank(pool: Pool, folder: Path, family: str, tied: bool) -> Said:
    source = write_model(folder / f"{family}-{tied}", family, seed=6, tie_word_embeddings=tied)
    said = _trip(pool, source, "float32", "tp=1", prompts=PROMPTS)
    assert said is not None
    return said


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("one-rank")


@pytest.mark.parametrize(
    ("family", "layout"),
    QUICK + [pytest.param(*case, marks=pytest.mark.full) for case in REST],
)
def test_there_and_back_and_the_same_function(
    pool: Pool, shared: Path, tmp_path: Path, family: str, layout: str
) -> None:
    # If import and export made the same mistake, the responses would show it.
    tied = layout == "pp=2"
    source = write_model(tmp_path / "source", family, seed=6, tie_word_embeddings=tied)
    said = _trip(pool, source, "float32", layout, prompts=PROMPTS)
    expected = _of_one_rank(pool, shared, family, tied)
    assert said is not None
    assert said[0] == expected[0]
    for logprobs, wanted in zip(said[1], expected[1], strict=True):
        assert logprobs == pytest.approx(wanted, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("family", "layout"),
    [IN_BF16, *(pytest.param(*case, marks=pytest.mark.full) for case in REST_IN_BF16)],
)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_there_and_back_in_bf16(
    pool: Pool, tmp_path: Path, family: str, layout: str, tied: bool
) -> None:
    options = {"torch_dtype": "bfloat16", "tie_word_embeddings": tied}
    source = write_model(tmp_path / "source", family, seed=6, **options)
    _trip(pool, source, "bfloat16", layout)


@pytest.mark.full
def test_more_tensor_ranks_than_groups_of_keys(pool: Pool, tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", "qwen3", seed=7, num_attention_heads=8)
    layouts = ("tp=1", "tp=4")
    said = {name: _trip(pool, source, "float32", name, prompts=PROMPTS) for name in layouts}
    assert said["tp=4"][0] == said["tp=1"][0]


@pytest.mark.parametrize(
    ("mistake", "layout"),
    [("two experts swapped", "dp=2,ep=2"), ("groups of keys permuted", "tp=2")],
)
def test_mistakes_over_the_ranks_are_noticed(
    pool: Pool, shared: Path, tmp_path: Path, mistake: str, layout: str
) -> None:
    right = _of_one_rank(pool, shared, "qwen3_moe", False)
    source = write_model(tmp_path / "source", "qwen3_moe", seed=6)
    config = config_of(source, layout=layout)
    once = {"target": tmp_path / "in", "mistake": mistake, "exporting": False}
    pool.on(config, round_trip, **once)
    with pytest.raises(AssertionError):
        assert_same_bits(read_folder(tmp_path / "in"), read_folder(source))
    twice = {"target": tmp_path / "both", "mistake": mistake, "prompts": PROMPTS}
    said = pool.on(config, round_trip, **twice)
    # The mistakes of import and export cancel each other.
    assert_same_bits(read_folder(tmp_path / "both"), read_folder(source))
    assert said[0] != right[0]


def test_every_rank_hears_of_an_export_that_failed(pool: Pool, tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", "qwen3_moe", seed=7)
    told = pool.each(config_of(source, layout="tp=2"), failed_export, target=source)
    assert told == [f"{source}: has files in it already; give a new or an empty folder"] * 2
