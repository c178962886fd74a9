"""Workflows about AlgZoo: tiny networks trained on tasks with known correct answers."""
