"""What all sections of a configuration share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Text = Annotated[str, Field(min_length=1)]
Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
# Megatron-Core adds numbers of ranks to it, and numpy takes no more than 32 bits of the sum.
Seed = Annotated[int, Field(ge=0, lt=2**31)]
ImportPath = Annotated[str, Field(pattern=r"^\w+(\.\w+)*:\w+$")]


class Section(BaseModel):
    # Strict: "5" for 5 and true for 1 are slips, and a run must not start on a slip.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
