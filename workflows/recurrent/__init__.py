"""Questions about recurrence: models that hand on a state, and layers gone through again."""
