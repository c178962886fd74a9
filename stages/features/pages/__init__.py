"""What a page of a feature shows, for all features of a dictionary: examples, partners, neighbours,
logits."""
