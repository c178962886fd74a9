"""Features over a corpus: encoding, statistics and strongest examples."""
