"""Checkpoints: tensors by name in any file format, dequantised and with an adapter merged in."""
