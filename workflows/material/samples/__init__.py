"""Texts that ship with workflows: samples with markers, couplets, and random repeated tokens."""
