"""Weights as objects of study: what heads, MLPs and features do to each other, read off their matrices."""
