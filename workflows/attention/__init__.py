"""Questions about attention: where heads look, and which of them do so for a reason that can be named."""
