"""The network of decoders whose layers hand on more than one stream."""
