"""What every section of a configuration is made of: strict values, and keys with a resume class."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

Text = Annotated[str, Field(min_length=1)]
Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
# Megatron-Core adds numbers of ranks to it, and numpy takes no more than 32 bits of the sum.
Seed = Annotated[int, Field(ge=0, lt=2**31)]
ImportPath = Annotated[str, Field(pattern=r"^\w+(\.\w+)*:\w+$")]

# May a key differ from what a run was started with, when the run is resumed?
RESUME = {
    # the second half of the run would be another experiment than the first
    "shapes": "no",
    # it changes where and how fast the run goes, or what is written down
    "harmless": "yes",
    # it is a path: the path may change, the contents of the file may not
    "contents": "with the same contents",
    # it is a path whose contents may change too: they are evaluated, not learned
    "shown": "yes",
    # unless a learning-rate decay ends there
    "steps": "without decay",
    # it names a function: the name may not change; changed code is allowed with a warning
    "code": "no; its code may",
}


class Section(BaseModel):
    # Strict: "5" for 5 and true for 1 are slips, and a run must not start on a slip.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


def key(resume: str, default: Any, meaning: str, **limits: Any) -> Any:
    """A key of a section, `resume` one of RESUME. `default` ... means that the key is required."""
    return Field(default, description=meaning, json_schema_extra={"resume": resume}, **limits)


shapes = partial(key, "shapes")
harmless = partial(key, "harmless")


def sections_of(schema: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The sections of a configuration by name."""
    return {name: info.annotation for name, info in schema.model_fields.items()}  # type: ignore[misc]


def keys_of(schema: type[BaseModel]) -> dict[str, FieldInfo]:
    """Every key of a configuration, as section.key, with its default, description and limits."""
    return {
        f"{name}.{key}": info
        for name, section in sections_of(schema).items()
        for key, info in section.model_fields.items()
    }
