"""What features do in a prompt: their activity, alignment, injection, sweeps over positions."""
