"""Changes of Megatron-Core for CPUs. Some of the changes are necessary on a CPU; the others only
save time."""
