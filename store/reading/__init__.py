"""Stored runs as labelled arrays: opening, selecting, repacking."""
