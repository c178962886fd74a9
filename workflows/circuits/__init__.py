"""Questions about circuits: which edges a task needs, and how much of it they do."""
