"""What changes when something inside is changed: patching, ablation, knockout, steering, tracing."""
