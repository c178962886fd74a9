"""Tokenizers and prompts: text to token ids and back."""
