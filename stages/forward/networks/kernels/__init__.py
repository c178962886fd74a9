"""Which kernel of torch computes what: for speed, and for sums whose order depends on nobody else.

Knows tensors; this file does not even import torch.
"""

FEW_ROWS = 32
"""Rows below which libraries have kernels of their own for a product, which sum in another order: MKL below
12 for up to eight threads, below 28 for sixteen."""
