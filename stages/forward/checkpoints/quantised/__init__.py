"""Quantised checkpoints: which tensors are packed how, and how they are dequantised."""
