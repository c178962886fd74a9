"""Edges of the residual-stream graph, from outputs of heads and MLPs to inputs of later parts."""
