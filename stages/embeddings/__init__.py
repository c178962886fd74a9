"""Embeddings: one vector per text, from a sentence encoder and the files of sentence-transformers."""
