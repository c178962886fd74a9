"""File formats of dictionaries, one module per format."""
