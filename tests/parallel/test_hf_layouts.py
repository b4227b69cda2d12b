"""Import and export on sharded layouts: the same bits come back, and the same function is run."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import pytest

from gspo_megatron.config import Layout
from tests.parallel.hf_trips import failed_export, round_trip, streamed_everywhere
from tests.parallel.pool import Pool
from tests.unit.checkpoint.hf.published import (
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
# what the other families have that qwen3_moe has not, on the layouts that cut it
OTHERS = [
    ("qwen3", "tp=2,pp=2"),
    ("qwen2_moe", "tp=2,etp=2"),
    ("qwen2_moe", "tp=2,pp=2,vpp=2,ep=2"),
    ("mixtral", "tp=2,ep=2"),
    ("mixtral", "pp=2"),
    ("olmoe", "tp=2,etp=2"),
    ("deepseek_v3", "tp=2"),
    ("deepseek_v3", "tp=2,pp=2,vpp=2,ep=2"),
]
MORE_LAYOUTS = ["cp=2", "dp=2,cp=2,ep=2", "tp=2,ep=2,etp=2,pp=2"]
# log-probs in fp32: sums over the shards in another order
TOLERANCE = 1e-5


def _prompts() -> list[list[int]]:
    draw = random.Random(8)
    return [[draw.randrange(VOCABULARY) for _ in range(length)] for length in (4, 1, 7)]


def _experts_fit(family: str, layout: str) -> bool:
    split = Layout.parse(layout)
    return family != "qwen3" or (split.ep == 1 and split.etp in (None, 1))


def _trip(
    pool: Pool, folder: Path, family: str, layout: str, dtype: str, tied: bool, speak: bool
) -> tuple[list[list[int]], list[list[float]]] | None:
    name = f"{family}-{layout.replace(',', '-').replace('=', '')}-{dtype}-{tied}"
    source = write_model(folder / name, family, seed=6, torch_dtype=dtype, tie_word_embeddings=tied)
    target = folder / f"{name}-again"
    said = pool.run(
        Layout.parse(layout).world_size,
        round_trip,
        source=source,
        target=target,
        dtype=dtype,
        layout=layout,
        prompts=_prompts() if speak else None,
    )
    assert_same_bits(read_folder(target), read_folder(source))
    return said


@functools.cache
def _of_one_rank(
    pool: Pool, folder: Path, family: str, tied: bool
) -> tuple[list[list[int]], list[list[float]]]:
    said = _trip(pool, folder, family, "tp=1", "float32", tied, speak=True)
    assert said is not None
    return said


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("one-rank")


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *(("qwen3_moe", layout) for layout in LAYOUTS[1:]),
        *OTHERS,
        *(
            pytest.param(family, layout, marks=pytest.mark.full)
            for family in CONFIGS
            for layout in LAYOUTS[1:] + MORE_LAYOUTS
            if _experts_fit(family, layout)
            and (family, layout) not in OTHERS
            and not (family == "qwen3_moe" and layout in LAYOUTS)
        ),
    ],
)
def test_there_and_back_and_the_same_function(
    pool: Pool, shared: Path, tmp_path: Path, family: str, layout: str
) -> None:
    # a mistake that import and export share would show in what the model says
    tied = layout == "pp=2"
    said = _trip(pool, tmp_path, family, layout, "float32", tied, speak=True)
    expected = _of_one_rank(pool, shared, family, tied)
    assert said is not None
    assert said[0] == expected[0]
    for logprobs, wanted in zip(said[1], expected[1], strict=True):
        assert logprobs == pytest.approx(wanted, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3_moe", "tp=2,pp=2,ep=2"),
        *(
            pytest.param(family, layout, marks=pytest.mark.full)
            for family in CONFIGS
            for layout in LAYOUTS[1:]
            if _experts_fit(family, layout) and (family, layout) != ("qwen3_moe", LAYOUTS[5])
        ),
    ],
)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_there_and_back_in_bf16(
    pool: Pool, tmp_path: Path, family: str, layout: str, tied: bool
) -> None:
    _trip(pool, tmp_path, family, layout, "bfloat16", tied, speak=False)


@pytest.mark.full
def test_more_tensor_ranks_than_groups_of_keys(pool: Pool, tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", "qwen3", seed=7, num_attention_heads=8)
    said = {}
    for layout in ("tp=1", "tp=4"):
        target = tmp_path / layout
        said[layout] = pool.run(
            Layout.parse(layout).world_size,
            round_trip,
            source=source,
            target=target,
            dtype="float32",
            layout=layout,
            prompts=_prompts(),
        )
        assert_same_bits(read_folder(target), read_folder(source))
    assert said["tp=4"][0] == said["tp=1"][0]


@pytest.mark.parametrize("layout", ["dp=2,ep=2", "tp=2,pp=2,cp=2"])
def test_every_rank_gets_the_stream(pool: Pool, tmp_path: Path, layout: str) -> None:
    source = write_model(tmp_path / "source", "qwen3_moe", seed=7)
    seen = pool.run(
        Layout.parse(layout).world_size,
        streamed_everywhere,
        source=source,
        dtype="bfloat16",
        layout=layout,
    )
    expected = {name: tensor.bfloat16() for name, tensor in read_folder(source).items()}
    assert_same_bits(seen, expected)


@pytest.mark.parametrize(
    ("mistake", "layout"),
    [("two experts swapped", "dp=2,ep=2"), ("groups of keys permuted", "tp=2")],
)
def test_mistakes_over_the_ranks_are_noticed(
    pool: Pool, shared: Path, tmp_path: Path, mistake: str, layout: str
) -> None:
    right = _of_one_rank(pool, shared, "qwen3_moe", False)
    source = write_model(tmp_path / "source", "qwen3_moe", seed=6)
    arguments = {"source": source, "dtype": "float32", "layout": layout, "mistake": mistake}
    pool.run(2, round_trip, target=tmp_path / "in", exporting=False, **arguments)
    with pytest.raises(AssertionError):
        assert_same_bits(read_folder(tmp_path / "in"), read_folder(source))
    said = pool.run(2, round_trip, target=tmp_path / "both", prompts=_prompts(), **arguments)
    assert_same_bits(read_folder(tmp_path / "both"), read_folder(source))  # it cancels out
    assert said[0] != right[0]


def test_every_rank_hears_of_an_export_that_failed(pool: Pool, tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", "qwen3_moe", seed=7)
    told = pool.run(2, failed_export, source=source, target=source, layout="tp=2")
    assert told == f"{source}: has files in it already; give a new or an empty folder"
