"""A stand-in for Transformer Engine, which cannot be imported without CUDA's libraries.

The stand-in has the names and parameters of the recorded signatures (`tables.py`), and refuses the
calls that Transformer Engine's sources refuse (`contract.json`). It computes the plain results in
torch, forward and backward. It contains none of Transformer Engine's code, and shows nothing about
its kernels.
"""
