"""Grids of interventions over layers, positions and heads (patching, causal tracing, ablation), and their
metrics.
"""
