"""Models as users have them: files, identity, loading, and the object that holds the weights."""
