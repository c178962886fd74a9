"""Decoders whose layers hand on more than one stream."""
