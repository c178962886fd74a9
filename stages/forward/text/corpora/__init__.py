"""Corpora: documents in files of any size, as token ids end to end."""
