"""A stand-in for Transformer Engine, which nobody can import without CUDA's libraries.

It has the names and the parameters of the kept tables of signatures (`tables.py`), refuses what
Transformer Engine's sources refuse (`contract.json`), and then computes the plain result in torch,
forward and backward. Nothing of Transformer Engine's code is in it, and nothing of its kernels is
shown by it.
"""
