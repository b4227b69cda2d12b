"""Weights in the published layout of Hugging Face models."""
