"""Encoders with decoders, as architectures. Never imports torch."""
