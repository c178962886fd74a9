"""AlgZoo: networks of a few to a few hundred numbers, trained on tasks whose right answers are known."""
