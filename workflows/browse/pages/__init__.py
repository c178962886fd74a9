"""A file per kind of page: a store in, a page of values out, the same for the server and for files."""
