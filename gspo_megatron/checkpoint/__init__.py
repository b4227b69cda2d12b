"""Checkpoints: saved and resumed on any layout, and converted to and from Hugging Face's format."""
