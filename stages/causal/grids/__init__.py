"""Grids over layers, positions and heads: patching, tracing, ablation, and metrics of what they change."""
