"""Probes as monitors: detectors of a labelled property of prompts, trained on stored states."""
