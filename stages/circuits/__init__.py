"""Circuits: discovery of the edges that a behaviour needs, by gradients and exact runs, and their
evaluation.
"""
