"""The command line: one file for each command, which parses, calls and prints.

Nothing here imports torch before a command needs it, so that `--help` and errors in a configuration
appear at once.
"""
