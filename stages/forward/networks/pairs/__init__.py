"""Encoders with decoders, as networks."""
