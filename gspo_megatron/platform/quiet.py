"""Quiet imports. On every rank, Megatron-Core and torch warn about each optional accelerator
package that is not installed. These warnings would hide the first line that matters. `doctor` lists
the packages that are not installed."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Generator

_NOISE = (
    r".*[Aa]pex.*not installed.*",
    r".*Transformer ?Engine.*not.*install.*",
    r".*CUDA initialization.*",
    r".*CUDA_DEVICE_MAX_CONNECTIONS.*",
    r".*full scope is deprecated.*",  # about unused CUDA graphs
    r".*\.grad attribute of a Tensor that is not a leaf.*",  # the distributed optimizer's shards
    r".*torch\.distributed\.\w+ is deprecated.*|.*`torch\.distributed\.\w+` is deprecated.*",
    r".*GPTModel.*deprecated.*",
    r".*experimental and still under active development.*",
    r".*torch\.cuda\.amp\.custom_[fb]wd.*",
)


@contextlib.contextmanager
def quiet_imports() -> Generator[None]:
    """Ignore all warnings while Megatron-Core is imported. Afterwards ignore only the warnings that
    are listed above."""
    for name in ("megatron", "torch.distributed.distributed_c10d", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    for pattern in _NOISE:
        warnings.filterwarnings("ignore", message=pattern)
