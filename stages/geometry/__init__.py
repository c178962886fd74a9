"""Geometry of hidden states: principal components, similarity, contrastive directions, probes, the count
helix."""
