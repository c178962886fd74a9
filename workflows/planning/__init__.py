"""Plans as features, many of them: one workflow."""
