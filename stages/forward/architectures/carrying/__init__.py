"""Architectures of Gemma 3n and 4, whose layers pass on more than the residual stream. Never imports
torch."""
