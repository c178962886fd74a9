"""Reading logits from internal states: logit lens, direct logit attribution, residual stream
decomposition."""
