"""The keys of the section `training` that say what a run does when its policy collapses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gspo_megatron.config.section import Section, harmless

# The seed of a sample holds the step and the number of rollbacks in 32 bits: see
# `ReinforcementLoop._draw_number`.
STEP_BITS = 24
Rollbacks = Annotated[int, Field(ge=0, lt=1 << (32 - STEP_BITS))]


class CollapseKeys(Section):
    """The keys of the section `training` about a collapse."""

    on_collapse: Literal["warn", "stop", "rollback"] = harmless(
        "warn",
        "what the run does when its policy collapses (docs/campaigns.md): it prints one "
        "warning (warn), saves and ends (stop), or goes back to the last healthy checkpoint and "
        "continues with other samples and prompts (rollback)",
    )
    max_rollbacks: Rollbacks = harmless(
        2, "largest number of rollbacks of a run; the next collapse ends the run, as with stop"
    )
