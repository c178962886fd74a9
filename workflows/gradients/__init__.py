"""Questions about gradients: what they propose, and what exact runs say of it."""
