"""HTML pages about the content of a store, served on this machine or written as files; see ../DESIGN.md."""
