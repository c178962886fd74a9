"""The arrays of a result: one Zarr group, written and read."""
