"""Architectures of encoder-decoder models (T5, BART and relatives). Never imports torch."""
