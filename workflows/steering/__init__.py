"""Questions about pushes: how far an answer follows one, and whether the states come back."""
