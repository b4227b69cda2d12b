"""Corpora for pre-training: files of text to Megatron-Core's indexed datasets."""
