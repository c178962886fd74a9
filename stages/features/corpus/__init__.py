"""Features over a corpus: encoded, counted, with their strongest examples."""
