"""Keep start-up quiet.

Megatron-Core and torch warn about each optional accelerator that is absent (Transformer Engine,
NVIDIA's apex, the CUDA driver). On a machine without a GPU none of it is news, and `doctor` tells
it to those who ask; four ranks times twelve warnings would bury the first line that matters.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator

# Each is emitted at import or first use by megatron.core or torch, once a rank.
_NOISE = (
    r".*[Aa]pex.*not installed.*",
    r".*Transformer ?Engine.*not.*install.*",
    r".*TE.*not.*available.*",
    r".*CUDA initialization.*",
    r".*Can't initialize NVML.*",
    r".*CUDA is not available.*",
    r".*pin_memory.*no accelerator.*",
    r".*legacy TypedStorage.*",
    r".*use_reentrant.*",
    r".*_all_gather_base.*|.*_reduce_scatter_base.*",
    r".*Gloo.*does not support.*",
    r".*lr_scheduler.step.*",
    r".*torch\.cuda\.amp\.custom_[fb]wd.*",
)


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Hold back every warning while Megatron-Core is imported, then only the known noise."""
    os.environ.setdefault("TORCH_NCCL_AVOID_RECORD_STREAMS", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    for pattern in _NOISE:
        warnings.filterwarnings("ignore", message=pattern)
    for name in ("megatron", "torch.distributed.distributed_c10d", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
