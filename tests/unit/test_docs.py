"""docs/objectives.md, compared with the code."""

from __future__ import annotations

import ast
import math
import re
from typing import Any, get_args

import pytest
import torch
import yaml

from gspo_megatron.config import parse_config
from gspo_megatron.config.distillation import DistillationSection
from gspo_megatron.config.objectives import (
    AGGREGATIONS,
    CORRECTIONS,
    RECIPES,
    RULES,
    objective_problems,
    resolve_objective,
)
from gspo_megatron.config.schema import ObjectiveSection
from gspo_megatron.objectives import build_objective
from gspo_megatron.rl.distillation import divergence_metrics, top_k_metrics, with_divergence
from tests.e2e.test_train import KEYS
from tests.programs import ROOT
from tests.unit.objectives.batches import make_inputs

PAGE = ROOT / "docs" / "objectives.md"
TEXT = PAGE.read_text(encoding="utf-8")
OWN = ROOT / "examples" / "objectives" / "custom_objective.py"
MAX_CODE_LINES = 25  # the page promises that a custom loss fits on a screen


def table(first_header: str) -> list[dict[str, str]]:
    """The rows of the only table whose first column has this header. Each row is a mapping by
    header."""
    lines = TEXT.splitlines()
    [start] = [n for n, line in enumerate(lines) if line.startswith(f"| {first_header} |")]
    headers = cells(lines[start])
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        assert len(cells(line)) == len(headers), line
        rows.append(dict(zip(headers, cells(line), strict=True)))
    return rows


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")]


def code(cell: str) -> list[str]:
    """The texts in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def numbers(cell: str) -> dict[str, float]:
    """The `name=value` pairs of a cell. Names without a value are left out."""
    return {
        name: float(value) for name, _, value in (s.partition("=") for s in code(cell)) if value
    }


def section(text: str) -> ObjectiveSection:
    """An `objective` section in YAML, without the rules about several keys."""
    values = {"data": {"tokenizer": "t"}, "objective": yaml.safe_load(text)}
    return parse_config(values).objective


def choices(part: str) -> set[str]:
    """The values that the schema allows for a part of an objective."""
    annotation: Any = ObjectiveSection.model_fields[part].annotation
    literals = [each for each in (annotation, *get_args(annotation)) if get_args(each)]
    return {value for each in literals for value in get_args(each) if isinstance(value, str)}


def test_every_preset_stands_in_the_table_once_and_in_order() -> None:
    assert [row["name"] for row in table("name")] == [f"`{name}`" for name in RECIPES]


@pytest.mark.parametrize("name", RECIPES)
def test_a_presets_row_is_its_recipe(name: str) -> None:
    [row] = [row for row in table("name") if row["name"] == f"`{name}`"]
    recipe = RECIPES[name]
    parts = [recipe.ratio, recipe.rule, recipe.aggregation, recipe.advantage]
    assert code(row["parts"]) == parts
    assert not recipe.corrections  # the table has no column for corrections
    assert numbers(row["defaults"]) == dict(recipe.parameters)
    links = dict(re.findall(r"\[(arXiv [\d.]+)\]\((\S+)\)", row["source"]))
    assert links == {name: f"https://arxiv.org/abs/{name.split()[1]}" for name in links}
    assert links or name == "ipo"
    assert re.sub(r"\[([^]]+)\]\(\S+\)", r"\1", row["source"]) == recipe.source
    assert row["maximises"].startswith("`1/") and row["when to use it"]


def test_every_rule_stands_there_with_its_ratios_and_numbers() -> None:
    rows = {row["rule"].strip("`"): row for row in table("rule")}
    assert set(rows) == set(RULES) == choices("rule")
    for name, rule in RULES.items():
        row = rows[name]
        assert tuple(code(row["on ratios"])) == rule.ratios
        assert [each.partition("=")[0] for each in code(row["reads"])] == list(rule.defaults)
        # The objective's own rule must differ from `name`. Then the resolved numbers are the
        # defaults of the rule `name`, not values of the objective.
        foreign = "grpo" if name != "min_clip" else "sapo"
        ratio = "token" if "token" in rule.ratios else rule.ratios[0]
        resolved = resolve_objective(ObjectiveSection(name=foreign, rule=name, ratio=ratio))
        assert numbers(row["reads"]).items() <= dict(resolved.parameters).items(), name


def test_every_aggregation_and_advantage_stands_there() -> None:
    assert tuple(row["aggregation"].strip("`") for row in table("aggregation")) == AGGREGATIONS
    assert {row["advantage"].strip("`") for row in table("advantage")} == choices("advantage")
    assert {row["kl"].strip("`") for row in table("kl")} | {"none"} == choices("kl")


def test_which_aggregations_of_sequence_terms_are_refused() -> None:
    for row in table("aggregation"):
        chosen = ObjectiveSection(name="gspo", aggregation=row["aggregation"].strip("`"))
        refused = "refused" in row["of sequence terms"] or "only" in row["of sequence terms"]
        assert bool(list(objective_problems(chosen))) == refused, row


def test_every_correction_stands_there_with_its_bounds() -> None:
    rows = {row["correction"].strip("`"): row for row in table("correction")}
    assert set(rows) == {"none", *CORRECTIONS} == choices("correction")
    for name, row in rows.items():
        assert numbers(row["numbers"]) == (CORRECTIONS[name].defaults if name != "none" else {})


def test_the_clip_ranges_of_a_ratio_that_is_not_the_presets_own() -> None:
    words = " ".join(TEXT.split())
    defaults = "3e-4 and 4e-4 for geometric means over sequences, and 0.2 and 0.27 for the other"
    assert f"{defaults} ratios" in words
    for ratio, name, expected in (
        ("sequence", "grpo", (3e-4, 4e-4)),
        ("token", "gspo", (0.2, 0.27)),
        ("sequence_product", "gspo", (0.2, 0.27)),
    ):
        resolved = resolve_objective(ObjectiveSection(name=name, ratio=ratio)).parameters
        assert (resolved["clip_low"], resolved["clip_high"]) == expected


def test_the_example_of_parts_is_what_it_says() -> None:
    [example] = re.findall(r"```yaml\n(objective: .*# DAPO's loss.*)\n```", TEXT)
    said = resolve_objective(ObjectiveSection(**yaml.safe_load(example)["objective"]))
    dapo = resolve_objective(ObjectiveSection(name="dapo"))
    for part in ("ratio", "rule", "aggregation", "advantage", "parameters"):
        assert getattr(said, part) == getattr(dapo, part), part


@pytest.mark.parametrize("row", table("refused"), ids=lambda row: row["refused"])
def test_what_is_refused_is_refused_and_what_stands_beside_it_is_not(row: dict[str, str]) -> None:
    [refused], [instead] = code(row["refused"]), code(row["write instead"])
    assert row["why"]
    assert list(objective_problems(section(refused)))
    assert not list(objective_problems(section(instead)))


def test_the_shares_of_noise_outside_the_clip_range() -> None:
    def below(x: float) -> float:
        return 0.5 * (1 + math.erf(x / math.sqrt(2)))

    # a normal distribution with this sigma has a mean |x| of 0.011
    sigma = 0.011 * math.sqrt(math.pi / 2)
    for row in table("response tokens"):
        deviation = sigma / math.sqrt(int(row["response tokens"].replace(",", "")))
        share = below(-3e-4 / deviation) + below(-4e-4 / deviation)
        assert f"{share:.2f}" == row["share outside"]


def test_the_own_objective_is_quoted_as_it_is() -> None:
    quoted = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert quoted == [OWN.read_text(encoding="utf-8")]


def test_the_own_objective_is_short() -> None:
    source = OWN.read_text(encoding="utf-8")
    lines = {n for n, line in enumerate(source.splitlines(), 1) if line.strip()}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.FunctionDef)) and ast.get_docstring(node):
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    assert len(lines) <= MAX_CODE_LINES


def test_the_own_objectives_configuration_is_that_of_the_example() -> None:
    [quoted] = re.findall(r"```yaml\n(objective:\n.*?)```", TEXT, re.DOTALL)
    example = yaml.safe_load((OWN.with_suffix(".yaml")).read_text(encoding="utf-8"))
    said = yaml.safe_load(quoted)
    assert said["objective"].items() <= example["objective"].items()
    assert said["reward"] == example["reward"]


def test_every_metric_that_the_page_explains_is_measured() -> None:
    settings = {"correction": "token_tis", "off_policy_mask": 0.1, "kl": "k3", "kl_coefficient": 1}
    objective = build_objective(section(yaml.safe_dump({"name": "grpo"} | settings)), 8)
    inputs = make_inputs(0, with_reference=True)
    means = {name: float(n / d) for name, (n, d) in objective(inputs).means.items()}
    measured = {*objective.complete(means), *KEYS}  # every run writes KEYS
    teacher = torch.tensor([0.7, 0.3]).log().expand(len(inputs.mask), 2)
    form = DistillationSection(form="forward_kl_topk")
    distilled = with_divergence(
        objective(inputs), inputs, inputs, teacher, teacher, objective, form
    )
    measured |= {*distilled.means, *divergence_metrics(inputs, inputs.old_logprobs)}
    measured |= {*top_k_metrics(inputs, inputs.mask, teacher)}
    named = [name for row in table("metric") for name in code(row["metric"])]
    assert [name for name in named if name not in measured] == []
