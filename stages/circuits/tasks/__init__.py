"""Standard tasks of circuit discovery for any tokenizer: pairs of equal length with one-token answers."""
