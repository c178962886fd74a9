"""How states lie in space: components, similarity, directions, probes, the helix of counts."""
