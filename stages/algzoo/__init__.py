"""AlgZoo: networks of a few to a few hundred parameters, trained on tasks with known correct answers."""
