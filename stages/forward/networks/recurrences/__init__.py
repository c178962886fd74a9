"""Recurrences over tokens: the scans of recurrent mixers, on plain tensors."""
