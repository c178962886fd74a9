"""The store in a browser: pages about what it holds, served on this machine or written as files. See
../DESIGN.md."""
