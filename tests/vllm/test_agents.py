"""An unchanged agent, which uses the package openai, with real vLLM servers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from gspo_megatron.data.tokenizers import load_tokenizer
from gspo_megatron.rollout.store import read_groups
from tests.programs import ROOT, run_program
from tests.vllm.runs import make_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

AGENT = """
import json, os, sys
from openai import OpenAI

row = json.load(sys.stdin)
client = OpenAI()
tools = [{"type": "function", "function": {"name": "calculator", "parameters": {}}}]
messages = [{"role": "user", "content": row["prompt"]}]
said = []
for number in range(3):
    answer = client.chat.completions.create(
        model="policy", messages=messages, tools=tools, max_tokens=6, temperature=0.2
    )
    message = answer.choices[0].message
    said.append([message.content, answer.usage.completion_tokens])
    messages += [message, {"role": "user", "content": f"and {len(said)}?"}]
    if number == 1:  # it forgets what was before
        messages = messages[-2:]
with open("said", "a") as file:
    file.write(json.dumps(said) + "\\n")
client.post("/reward", body={"reward": len(said[-1][0]) / 9}, cast_to=object)
"""


@pytest.mark.parametrize("steps", [2, pytest.param(20, marks=pytest.mark.full)])
def test_an_agent_trains_unchanged(vllm_python: Path, tmp_path: Path, steps: int) -> None:
    maker = ROOT / "examples" / "tool_use" / "make_data.py"
    run_program(sys.executable, maker, "-o", tmp_path / "data")
    (tmp_path / "agent.py").write_text(AGENT)
    run = make_run(
        tmp_path,
        vllm_python,
        model={"vocab_size": 112},
        data={
            "prompts": str(tmp_path / "data" / "train.jsonl"),
            "tokenizer": str(tmp_path / "data" / "tokenizer.model"),
            "chat_template": True,
        },
        environment={
            "name": "agent",
            "options": {"command": f"{vllm_python} {tmp_path / 'agent.py'}"},
        },
        rollout={
            "group_size": 2,
            "prompts_per_step": 2,
            "max_response_tokens": 40,
            "max_staleness": 0,
        },
        training={"steps": steps, "precision": "fp32"},
        checkpoint={"interval": steps},
    )
    process = run.start()
    bank = run.out / "rollouts" / "step_00000001_0.groups"
    groups = run.wait(process, lambda: bank.exists() and read_groups(bank))
    while len(groups) < 2:
        groups = run.wait(process, lambda: read_groups(bank))
    run.finish(process)
    records = run.steps()
    assert [record["step"] for record in records] == [*range(1, steps + 1)]
    for record in records:
        # The trainer has exactly the tokens that the server sampled. With different tokens, the
        # log-probs would differ, too.
        assert record["mismatch/abs_mean"] <= 1e-5
        assert record["environment/turns"] == 3 and record["environment/errors"] == 0
        assert record["environment/branches"] == 2
    # The tokens in the store give the text that the agent received.
    tokenizer = load_tokenizer(tmp_path / "data" / "tokenizer.model")
    said = [json.loads(line) for line in (tmp_path / "said").read_text().splitlines()]
    assert len(said) == 4 * steps
    for group in groups.values():
        lengths = group.response_lengths
        masks = np.split(group.sampled, lengths.cumsum()[:-1])
        whole = group.prompt_lengths + lengths
        rows = np.split(group.tokens, whole.cumsum()[:-1])
        kinds = np.split(group.in_response, whole.cumsum()[:-1])
        for row, kind, mask in zip(rows, kinds, masks, strict=True):
            written = row[kind][mask].tolist()
            found = tokenizer.decode(written), len(written)
            assert found in [
                ("".join(t for t, _ in turns), sum(c for _, c in turns)) for turns in said
            ]
