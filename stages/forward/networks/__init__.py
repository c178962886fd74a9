"""The torch side of an architecture: the one loop over layers, and what a layer computes."""
