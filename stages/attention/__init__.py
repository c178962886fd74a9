"""Where attention looks, and which heads do what."""
