"""One config-driven decoder for every supported transformer family.

Axis glossary, for all files in this folder: B prompts of a batch, S positions, D hidden (residual width), H
query heads, Hk key/value heads (H = r * Hk; key head j serves query heads j*r … j*r + r-1), dh d_head, M
mlp width, V vocabulary. Layers count from 0. Attention matrices are [B, H, query_position, key_position].
"""
