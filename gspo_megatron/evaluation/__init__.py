"""Evaluation suites: the figures of a suite, and suites on an OpenAI-compatible server."""
