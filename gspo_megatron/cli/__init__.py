"""The command line: one file a command, each of which parses, calls and prints.

Nothing here imports torch before a command needs it, so that `--help` and every mistake in a
configuration are answered at once.
"""
