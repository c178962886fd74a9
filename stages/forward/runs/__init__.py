"""Runs and experiments: what the planner is asked, and what of it is stored."""
