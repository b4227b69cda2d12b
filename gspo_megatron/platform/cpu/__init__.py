"""Megatron-Core on a CPU."""
