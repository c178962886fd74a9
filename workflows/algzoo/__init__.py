"""Questions about the tiny networks of AlgZoo."""
