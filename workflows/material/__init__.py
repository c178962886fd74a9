"""What questions are asked with: subjects, facts, pairs, presets, samples, and places in prompts."""
