"""Saves and resumes checkpoints on any layout, and converts them from and to the format of Hugging
Face."""
