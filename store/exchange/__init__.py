"""Import from and export to the file formats of other programs."""
