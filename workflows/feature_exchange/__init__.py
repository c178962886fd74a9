"""What does exchanging features here do there? One question, and the five workflows that are its presets."""
