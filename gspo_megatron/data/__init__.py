"""Prompt files, tokenizers, the order in which prompts are drawn, and packing."""
