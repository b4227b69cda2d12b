"""What ranks do with the stand-in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.cuda_rehearsal.engine import package


def with_calls(task: Callable[..., Any], **arguments: Any) -> tuple[Any, set[str]]:
    """The task's result, and the names of Transformer Engine that it has called."""
    package.reached.clear()
    return task(**arguments), set(package.reached)
