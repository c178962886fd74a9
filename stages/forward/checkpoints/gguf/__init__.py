"""GGUF files of llama.cpp, read as the transformers checkpoints that they were converted from."""
