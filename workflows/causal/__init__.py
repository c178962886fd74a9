"""Questions about causes: parts of a model put in, taken out or cut off, and what it then says."""
