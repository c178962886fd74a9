"""Workflows that attribute an answer by gradients, each checked against exact interventions."""
