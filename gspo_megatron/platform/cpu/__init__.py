"""Megatron-Core on a CPU: what it needs there, and what only makes it faster."""
