"""Recurrences over tokens: the scans that recurrent mixers are made of. Knows tensors only."""
