"""Commands about a store as it is: what it holds, in and out of it, and what may go."""
