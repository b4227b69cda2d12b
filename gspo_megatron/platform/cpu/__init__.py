"""Changes for Megatron-Core on a CPU: those that it needs, and those that only make it faster."""
