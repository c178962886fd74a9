"""Generation: texts continued token by token, under interventions."""
