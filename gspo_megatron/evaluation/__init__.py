"""Evaluation suites: figures of responses to problems, and suites on a server's URL."""
