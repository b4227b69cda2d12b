"""Rollout engines: the sharded training model itself, or vLLM servers."""
