"""Processes of a run: launcher, signals, heartbeat, sandbox, workers."""
