"""Workflows about attention: patterns of a prompt, detection of head types, and scans over layers."""
