"""Inputs of workflows: facts, pairs of prompts, presets, text samples, and positions in prompts."""
