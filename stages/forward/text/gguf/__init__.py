"""The vocabulary in a GGUF file, converted back to the tokenizer.json it was made from."""
