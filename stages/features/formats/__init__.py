"""The formats that dictionaries come in, a file each."""
