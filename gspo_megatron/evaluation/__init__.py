"""Figures of evaluation suites, and evaluation of the model behind an OpenAI-compatible server."""
