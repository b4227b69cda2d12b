"""Tensor operations that work on one rank's shard; process groups and sums are arguments."""
