"""Rollouts by the training model itself."""
