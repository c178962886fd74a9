"""The network of decoders whose layers pass on more tensors than the residual stream (Gemma 3n, Gemma 4)."""
