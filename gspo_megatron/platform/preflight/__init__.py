"""A look at the nodes of a job before it trains: devices, their speed, and the links between them.

Ranks talk through torch's key-value store until all of them are known to be sound, so that a node
that is not can be named instead of being waited for.
"""
