"""Workflows about text: tokenization, continuation of prompts, and filling in masks."""
