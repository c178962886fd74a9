"""What a network of AlgZoo does, and why: analyses of its three matrices, and accounts of how much is
understood."""
