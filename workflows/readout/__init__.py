"""Workflows that decode hidden states: logit lens, direct logit attribution, linear probes, character
counts."""
