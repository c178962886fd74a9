"""Transformers told as blocks: families whose layers all attend, but differ from each other, route tokens to
experts, or place norms and residuals in another way than the decoder of transformer.py."""
