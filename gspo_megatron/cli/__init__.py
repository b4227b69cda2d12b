"""The command line. Each command has its own file, which parses the arguments, calls the package
and prints the results.

Nothing here imports torch before a command needs it, so that `--help` and errors in a configuration
appear at once.
"""
