"""Engines that sample responses: the sharded training model itself, or vLLM servers."""
