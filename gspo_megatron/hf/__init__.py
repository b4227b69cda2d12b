"""Reads and writes weights in the layout of published Hugging Face models."""
