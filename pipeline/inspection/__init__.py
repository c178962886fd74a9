"""Inspection of a user's function: variables that its code reads, and which packages these belong to."""
