"""The vocabulary inside a GGUF file, as the tokenizer.json it was made of."""
