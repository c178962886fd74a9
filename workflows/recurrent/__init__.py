"""Workflows about recurrence: models with a recurrent state, and repeated passes through layers."""
