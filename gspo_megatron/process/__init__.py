"""Processes and what surrounds them: launcher, signals, heartbeat, sandbox."""
