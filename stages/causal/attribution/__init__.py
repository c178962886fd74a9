"""Attribution of a metric to activations by gradients, and its verification by exact runs."""
