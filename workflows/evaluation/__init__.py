"""Evaluation of a model: loss, induction, factual recall, and the cost of an intervention."""
