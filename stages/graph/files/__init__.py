"""Reads and writes graphs as files of other programs: circuit-tracer, its viewer, GraphML, Parquet."""
