"""Quantised checkpoints: what of a checkpoint is packed how, and the plain weights it stands for."""
