"""GGUF files: what llama.cpp runs, read as the checkpoints they were made of."""
