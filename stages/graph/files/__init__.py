"""Graphs as files of other programs."""
