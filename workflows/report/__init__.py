"""Reports: a page per workflow that a browser opens offline, made of views. See DESIGN.md."""
