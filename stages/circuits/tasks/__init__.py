"""Tasks of the field, made for any tokenizer: pairs of prompts of equal length with answers of one token."""
