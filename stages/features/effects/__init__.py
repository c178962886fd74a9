"""Effects of features in single prompts: activity, alignment, injection, attribution, exchanges, pushes."""
