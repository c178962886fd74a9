"""Causal experiments: patching, ablation, knockout, steering, tracing and attribution, with their
controls.
"""
