"""The stand-in for Transformer Engine, under the name that Megatron-Core imports (see
tests/cuda_rehearsal/engine)."""

from tests.cuda_rehearsal.engine.package import fill

fill()
