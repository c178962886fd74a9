"""Networks of encoder-decoder models."""
