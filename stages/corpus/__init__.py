"""Text and token positions, statistics of stored states over a corpus, and reading states in blocks."""
