"""The convert command in both directions, on models of transformers and on our runs, and after
mistakes of the user."""

from __future__ import annotations

import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from gspo_megatron.checkpoint.convert import hf_to_megatron
from gspo_megatron.checkpoint.manifest import find_damage
from gspo_megatron.cli.main import main
from tests.e2e.conftest import Command, command_environment
from tests.programs import peak_memory
from tests.unit.hf.published import (
    assert_same_bits,
    model_config,
    random_tensors,
    read_folder,
    write_folder,
    write_model,
)


def converted(gspo: Command, *arguments: object) -> None:
    assert "written from" in gspo("convert", *arguments).stdout


def published_by_transformers(folder: Path) -> None:
    """Write a random model in several files, with unusual sizes, and with norms that are not 1."""
    transformers = pytest.importorskip("transformers")
    settings = model_config("qwen3_moe")
    settings = {k: v for k, v in settings.items() if k not in ("architectures", "torch_dtype")}
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**settings)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape) / 4 + ("norm" in name))
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="60KB")


def test_a_model_of_transformers_there_and_back(gspo: Command, tmp_path: Path) -> None:
    source, ours, back = (tmp_path / name for name in ("source", "ours", "back"))
    published_by_transformers(source)
    assert len(list(source.glob("*.safetensors"))) > 2
    converted(gspo, "hf-to-megatron", source, ours)
    assert find_damage(ours) == []
    converted(gspo, "megatron-to-hf", ours, back, "--layout", "tp=2,ep=2")
    assert len(list(back.glob("*.safetensors"))) >= 2  # one file for each process
    assert_same_bits(read_folder(back), read_folder(source))
    tokens = torch.randint(37, (2, 11))
    logits = [logits_by_transformers(folder, tokens) for folder in (source, back)]
    assert torch.equal(*logits)


def logits_by_transformers(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    import transformers

    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(loading.values()), loading
    with torch.no_grad():
        return model(tokens).logits


def test_mistakes_are_told_line_by_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def refusal(*arguments: object) -> list[str]:
        assert main(["convert", *map(str, arguments)]) == 2
        return capsys.readouterr().err.splitlines()

    config = model_config("qwen3_moe")
    tensors = random_tensors(config, seed=1)
    del tensors["model.norm.weight"]
    tensors["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(20, 43)
    tensors["model.layers.1.self_attn.k_proj.bias"] = torch.zeros(20)
    source = write_folder(tmp_path / "source", config, tensors)
    lines = refusal("hf-to-megatron", source, tmp_path / "ours")
    assert len(lines) == 3, lines
    (line,) = refusal("megatron-to-hf", tmp_path, tmp_path / "back", "--layout", "tp=x")
    assert "layout" in line
    (line,) = refusal("megatron-to-hf", tmp_path, tmp_path / "back", "--layout", "tp=8,pp=16")
    assert "takes 128 processes" in line
    assert not any((tmp_path / name).exists() for name in ("ours", "back"))


@pytest.fixture
def small_disk(tmp_path: Path) -> list[str]:
    """The first words of a command line. They run the command that follows them with a file system
    of 2 MB at tmp_path/disk."""
    (tmp_path / "disk").mkdir()
    script = 'mount -t tmpfs -o "$0" none "$1" && shift && exec "$@"'
    start = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script]
    words = [*start, "size=2m", str(tmp_path / "disk")]
    try:
        worked = subprocess.run([*words, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        worked = False
    if not worked:
        pytest.skip("this user may not mount a file system of its own")
    return words


def test_a_disk_that_is_too_small_and_one_that_is_read_only(
    small_disk: list[str], tmp_path: Path
) -> None:
    source = write_model(tmp_path / "source", "qwen3_moe", seed=2, vocab_size=9001)
    disk = tmp_path / "disk"
    command = [sys.executable, "-m", "gspo_megatron", "convert", "hf-to-megatron", str(source)]
    for mount, expected in (("size=2m", r"bytes to write, "), ("ro", "Read-only file system")):
        words = [mount if word == "size=2m" else word for word in small_disk]
        result = subprocess.run(
            [*words, *command, str(disk / "ours")],
            capture_output=True,
            text=True,
            env=command_environment(),
            check=False,
        )
        assert result.returncode == 2, result.stderr
        (line,) = result.stderr.splitlines()
        assert line.startswith(f"{disk / 'ours'}: ")
        assert expected in line


@pytest.mark.parametrize("direction", ["hf-to-megatron", "megatron-to-hf"])
def test_a_disk_that_fills_up_meanwhile(tmp_path: Path, direction: str) -> None:
    """At the start of the command there is enough space. Later, no file can grow beyond 256 KB."""
    source = write_model(tmp_path / "hf", "qwen3_moe", seed=3, vocab_size=9001)
    if direction == "megatron-to-hf":
        hf_to_megatron(source, tmp_path / "ours")
        source = tmp_path / "ours"
    limit = 256 * 1024

    def small_files() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write then fails with EFBIG
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    result = subprocess.run(
        [sys.executable, "-m", "gspo_megatron", "convert", direction, str(source), "out"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=command_environment(),
        preexec_fn=small_files,
        check=False,
    )
    assert result.returncode == 2, result.stderr
    assert result.stderr.splitlines()[-1] == "out: cannot be written: File too large"
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def when_made(folder: Path) -> tuple[int, int] | None:
    """A pair of numbers that changes if the folder is replaced or emptied."""
    try:
        status = folder.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_ctime_ns


def kill_while_it_writes(command: list[str], partial: Path, delay: float) -> bool:
    """Kill the command while it runs. Returns whether it had begun to write and had not ended."""
    left = when_made(partial)  # the folder that the previous killed process left
    process = subprocess.Popen(
        command, env=command_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while when_made(partial) in (left, None) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    return process.wait() == -signal.SIGKILL and partial.exists()


@pytest.mark.parametrize("kills", [1, pytest.param(25, marks=pytest.mark.full)])
def test_a_killed_conversion_leaves_nothing_that_looks_whole(
    gspo: Command, tmp_path: Path, kills: int
) -> None:
    drawn = random.Random(kills)
    # The model has about 20 MB, which take 0.1 to 0.2 s to write and to compare.
    source = write_model(tmp_path / "hf", "qwen3_moe", seed=4, vocab_size=60_001)
    ours, back = tmp_path / "ours", tmp_path / "back"
    for words, result in (
        (["hf-to-megatron", str(source), str(ours)], ours),
        (["megatron-to-hf", str(ours), str(back)], back),
    ):
        partial = tmp_path / f".{result.name}.partial"
        command = [sys.executable, "-m", "gspo_megatron", "convert", *words]
        hit, longest = 0, 0.15
        while hit < kills:
            hit += kill_while_it_writes(command, partial, drawn.random() * longest)
            if result.exists():  # the kill came after the result was in place
                assert_whole(result, source)
                shutil.rmtree(result)
                # On this machine the kills come too late, so the next kills come earlier.
                longest *= 0.9
                assert longest > 0.001, "no kill comes while something is being written"
        converted(gspo, *words)
        assert_whole(result, source)
        assert not partial.exists()


def assert_whole(result: Path, source: Path) -> None:
    if result.name == "ours":
        assert find_damage(result) == []
    else:
        assert_same_bits(read_folder(result), read_folder(source))


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """The model has two tensors of 211 MB. The test does not count memory that the process had
    before the conversion."""
    source = write_model(
        tmp_path / "source", "qwen3_moe", seed=5, vocab_size=1_200_001, num_hidden_layers=1
    )
    assert read_folder(source)["lm_head.weight"].nbytes > 200e6
    start = peak_memory("-c", "import gspo_megatron.checkpoint.convert")
    ours, back = tmp_path / "ours", tmp_path / "back"
    for words in (("hf-to-megatron", source, ours), ("megatron-to-hf", ours, back)):
        peak = peak_memory("-m", "gspo_megatron", "convert", *map(str, words))
        # Each of up to four threads has two blocks of 16 MiB, and 32 MiB of files are mapped.
        assert peak - start < 200e6, words
        assert peak < 600e6, words
