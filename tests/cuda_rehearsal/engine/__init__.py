"""A stand-in for Transformer Engine, which cannot be imported without CUDA's libraries.

It has the names and parameters of the recorded signatures (`tables.py`), and refuses what
Transformer Engine's sources refuse (`contract.json`). Then it computes the plain result in torch,
forward and backward. It contains none of Transformer Engine's code, and shows nothing about its
kernels.
"""
