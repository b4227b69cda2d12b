"""The figures in docs/costs.md are the figures that `check` prints. The recipes of the page save
checkpoints."""

from __future__ import annotations

import pytest
import yaml

from tests.programs import ROOT
from tools.make_costs_doc import PAGE, RECIPES, markdown, row


@pytest.mark.slow
def test_the_row_of_a_recipe() -> None:
    assert row("gpt_oss_20b") in PAGE.read_text(encoding="utf-8").splitlines()


@pytest.mark.full
def test_the_page_is_what_the_tool_writes() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown()


def test_every_recipe_for_gpus_has_a_row() -> None:
    recipes = (PAGE.parent / "recipes.md").read_text(encoding="utf-8")
    assert all(
        f"examples/{name}/config.yaml; {ranks} ranks" in recipes
        for name, (ranks, _) in RECIPES.items()
    )


@pytest.mark.parametrize("name", RECIPES)
def test_a_job_with_the_recipe_can_be_resumed(name: str) -> None:
    """Without checkpoints, a Slurm job that reaches its time limit would begin at step 0 again."""
    recipe = yaml.safe_load((ROOT / "examples" / name / "config.yaml").read_text("utf-8"))
    assert recipe["checkpoint"]["interval"] > 0
