"""Reports: one HTML page per workflow, made of views, that a browser opens offline. See DESIGN.md."""
