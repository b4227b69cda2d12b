"""Changes of Megatron-Core for CPUs. It needs some of them to run, and the others make it
faster."""
