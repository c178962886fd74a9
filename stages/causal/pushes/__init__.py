"""Vectors added to the residual stream: steered texts, random pushes, and the absorption of pushes."""
