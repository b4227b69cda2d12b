"""GSPO post-training of Mixture-of-Experts language models on Megatron-Core's shards."""

__version__ = "0.1.0"
