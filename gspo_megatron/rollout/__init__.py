"""Responses by the training model itself (`megatron`) or by servers (`vllm`)."""
