"""Evaluation: loss, layer order and factual recall of a model, unchanged or under an intervention."""
