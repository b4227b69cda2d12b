"""Prompt files, chat templates, tokenizers, and the order in which prompts are used."""
