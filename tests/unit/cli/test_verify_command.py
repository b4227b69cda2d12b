"""The mistakes that `verify` refuses before it starts a rank."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gspo_megatron.process import launcher as launch
from tests.unit.cli.conftest import Command, ConfigWriter

LAYOUT = ("--layouts", "tp=1")
NO_NUMBER = "is not a number of 0 or more"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--checkpoint", "somewhere", *LAYOUT), "it has no effect without --step"),
        (("--step", "3", *LAYOUT), "the inputs of step 3 were not kept; the run has kept those"),
        (("--step", "0", *LAYOUT), "argument --step"),
        *(
            (("--tolerance=" + text,), f"{text!r} {NO_NUMBER}")
            for text in ("nan", "-1", "inf", "x")
        ),
        # the layout of a cluster starts on one machine only if the user asks for it
        (("parallel.layout=dp=4096",), "layout dp=4096: takes 4096 ranks, which are many"),
    ],
)
def test_what_is_refused(
    write_config: ConfigWriter,
    gspo: Command,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = gspo("verify", write_config(), *words)
    assert code == 2 and said in err


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7"}
        | {"SLURM_STEP_NODELIST": "n1"},
    ],
)
def test_it_is_no_rank_of_anything(
    write_config: ConfigWriter, gspo: Command, environ: dict[str, str]
) -> None:
    os.environ |= environ
    code, _, err = gspo("verify", write_config(), *LAYOUT)
    assert code == 2 and "start it once, outside torchrun and srun" in err


def test_a_signal_to_it_is_no_failure_of_a_layout(
    write_config: ConfigWriter, gspo: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "launch", lambda *_, **__: 130)
    assert gspo("verify", write_config(), *LAYOUT)[0] == 130
