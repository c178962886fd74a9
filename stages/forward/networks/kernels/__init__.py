"""Choice of torch's kernels: for speed, and for sums whose order does not depend on the rest of the batch.

This file does not import torch.
"""

FEW_ROWS = 32
"""Rows below which libraries use special kernels for a product, with another order of summation: MKL below 12
rows with up to eight threads, below 28 with sixteen."""
