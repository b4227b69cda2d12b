"""Megatron-Core's pipeline schedules as counts: micro-batches in flight, and the bubble."""

from __future__ import annotations


def in_flight(stages: int, stage: int, chunks: int, micro_batches: int) -> tuple[int, ...]:
    """Micro-batches whose activations a stage holds at its worst moment, for each of its chunks.

    Without interleaving a stage starts `stages - stage - 1` forward passes before the first
    backward pass, and holds one more from then on (1F1B). Interleaved, it starts two for each stage
    after it and one for each stage and each chunk but the last; passes take `stages` micro-batches
    through one chunk, then through the next.
    """
    total = micro_batches * chunks
    ahead = stages - stage - 1
    warm_up = ahead if chunks == 1 else 2 * ahead + (chunks - 1) * stages
    held = [0] * chunks
    for number in range(min(warm_up + 1, total)):
        held[number // stages % chunks if chunks > 1 else 0] += 1
    return tuple(held)


def bubble_share(stages: int, chunks: int, micro_batches: int) -> float:
    """Idle share of a mini-batch's time: (stages - 1) passes of a chunk at its ends."""
    return (stages - 1) / (micro_batches * chunks + stages - 1)
