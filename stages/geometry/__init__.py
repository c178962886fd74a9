"""Geometry of hidden states: principal components, similarity, contrastive directions, probes, and the curve
of mean states at each character count."""
