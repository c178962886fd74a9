"""Contents of the pages of all features of a dictionary: examples, partners, neighbours, logits."""
