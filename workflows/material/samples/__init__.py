"""Texts that questions ship with: samples of markers, first lines whose rhyme is asked for."""
