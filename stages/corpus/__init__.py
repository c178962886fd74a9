"""Tokens of a corpus: positions, spans, statistics, blocks that fit into memory."""
