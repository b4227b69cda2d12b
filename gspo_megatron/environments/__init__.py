"""Environments: what a policy acts in, and what the reward function sees of it."""
