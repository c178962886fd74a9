"""Questions about features of dictionaries: in a prompt, of a word, as a graph, and pages of all of them."""
