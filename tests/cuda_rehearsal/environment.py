"""The environment variables that give the rehearsed device to a program and all its children."""

from __future__ import annotations

import os

from tests.cuda_rehearsal import build, runtime
from tests.cuda_rehearsal.engine import package
from tests.programs import ROOT


def rehearsal(devices: int | None = None, engine: str | None = None) -> dict[str, str]:
    """Return the variables. devices: the number of devices on the host; None: the number of ranks
    that are launched on the host. engine: the version of Transformer Engine that the stand-in
    imitates; None: Transformer Engine counts as not installed."""
    paths = [str(build.FOLDER / "startup"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    if engine is not None:
        paths.insert(0, str(build.FOLDER / "engine" / "site"))
    found = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        runtime.LIBRARY: str(build.library()),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        # The tests hide GPUs, which would also hide the rehearsed devices.
        "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
    }
    found |= {} if engine is None else {package.VERSION: engine}
    return found | ({} if devices is None else {runtime.DEVICES: str(devices)})
