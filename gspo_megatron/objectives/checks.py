"""The shapes that every objective relies on."""

from __future__ import annotations

from gspo_megatron.types import LossInputs

_PER_TOKEN = (
    "old_logprobs",
    "mask",
    "sequence_index",
    "entropy",
    "token_advantages",
    "rollout_logprobs",
    "reference_logprobs",
)


def check_inputs(inputs: LossInputs, *, token_advantages: bool) -> None:
    """Assert that nothing would broadcast, or be ignored: `token_advantages` says they are read."""
    tokens, sequences = inputs.logprobs.shape, inputs.advantages.shape
    assert len(tokens) == 1, f"logprobs have shape {tuple(tokens)}, not [tokens]"
    assert len(sequences) == 1, f"advantages have shape {tuple(sequences)}, not [num_sequences]"
    for name in _PER_TOKEN:
        tensor = getattr(inputs, name)
        assert tensor is None or tensor.shape == tokens, (
            f"{name} has shape {tuple(tensor.shape)}, logprobs {tuple(tokens)}"
        )
    assert inputs.sequence_lengths.shape == sequences, (
        f"sequence_lengths have shape {tuple(inputs.sequence_lengths.shape)}, "
        f"advantages {tuple(sequences)}"
    )
    assert inputs.global_num_sequences > 0, "a mini-batch without sequences"
    assert token_advantages or inputs.token_advantages is None, (
        "token_advantages are given to an objective with one advantage a sequence"
    )
