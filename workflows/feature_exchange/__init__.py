"""Feature exchange: workflows that suppress and inject dictionary features at a token, and measure the effect
at the end of the text."""
