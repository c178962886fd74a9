"""Workflows about dictionary features: active features of a prompt, decoder search, attribution graphs,
pages."""
