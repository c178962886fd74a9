"""What the code of a user's function reads, and which of it is the user's own."""
