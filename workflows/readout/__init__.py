"""Questions about what can be read off a state: next tokens, what wrote them, labels, counts."""
